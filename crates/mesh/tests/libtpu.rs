//! Equality with libtpu's own answers (see `testdata/README.md`).

use std::collections::BTreeSet;

use serde_json::Value;
use tpu_dist_mesh::{Coord, Device, Generation, MultiSlice, Slice};

fn array3(value: &Value) -> [u32; 3] {
    std::array::from_fn(|axis| value[axis].as_u64().unwrap() as u32)
}

fn flags3(value: &Value) -> [bool; 3] {
    array3(value).map(|flag| flag != 0)
}

fn lines(text: &str) -> impl Iterator<Item = Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap())
}

#[test]
fn devices_equal_all_dumps() {
    let mut compared = 0;
    for dump in lines(include_str!("../testdata/topologies.jsonl")) {
        let name = dump["name"].as_str().unwrap();
        let options = &dump["options"];
        let mut slice: Slice = name.parse().unwrap();
        slice = slice.with_wrap(flags3(&dump["wrap"])).unwrap();
        if let Some(bounds) = options.get("chips_per_host_bounds") {
            slice = slice.with_chips_per_host(array3(bounds)).unwrap();
        }
        if slice.generation() == Generation::V4 && options.get("chip_config_name").is_none() {
            slice = slice.with_devices_per_chip(2).unwrap();
        }
        let spec = slice.generation().spec();
        assert_eq!(dump["kind"], spec.kind, "{name}");
        assert_eq!(dump["twist"] == 1, slice.is_twisted(), "{name}");
        if !dump["host_bounds"].is_null() {
            assert_eq!(array3(&dump["host_bounds"]), slice.host_bounds(), "{name}");
            assert_eq!(
                array3(&dump["chips_per_host_bounds"]),
                slice.chips_per_host(),
                "{name}"
            );
            assert_eq!(
                array3(&dump["chip_bounds"]),
                slice.shape().extents(),
                "{name}"
            );
            assert_eq!(dump["cores_per_chip"], spec.cores_per_chip, "{name}");
            assert_eq!(dump["limited_ici"], slice.has_limited_ici(), "{name}");
            assert_eq!(dump["routing"] == "nhop", slice.has_limited_ici(), "{name}");
        }
        let cores = spec.cores_per_chip / slice.devices_per_chip();
        assert_eq!(dump["cores_per_device"], cores, "{name}");
        // The cores of a v4 chip share its memory. libtpu keeps some for itself; the docs round.
        let parts = match slice.generation() {
            Generation::V4 => 1,
            _ => u64::from(slice.devices_per_chip()),
        };
        let memory = dump["memory"].as_u64().unwrap() * parts;
        let difference = spec.hbm_bytes.abs_diff(memory);
        assert!(
            difference < 3 << 30,
            "{name}: {memory} B of {} B",
            spec.hbm_bytes
        );

        let count = dump["num_slices"].as_u64().unwrap() as u32;
        let job = MultiSlice::new(slice, count).unwrap();
        let ours: Vec<Vec<i64>> = job
            .devices()
            .iter()
            .map(|d| {
                let [x, y, z] = d.coords.0;
                let slice = if count == 1 { -1 } else { i64::from(d.slice) };
                [d.id, x, y, z, d.core, d.process]
                    .into_iter()
                    .map(i64::from)
                    .chain([slice])
                    .collect()
            })
            .collect();
        let theirs: Vec<Vec<i64>> = serde_json::from_value(dump["devices"].clone()).unwrap();
        assert_eq!(ours, theirs, "{name} {options}");

        let number = |value: i64| u32::try_from(value.max(0)).unwrap();
        let mut devices: Vec<Device> = theirs
            .iter()
            .map(|row| Device {
                id: number(row[0]),
                coords: Coord([row[1], row[2], row[3]].map(number)),
                core: number(row[4]),
                process: number(row[5]),
                slice: number(row[6]),
            })
            .collect();
        devices.reverse();
        let recognized = MultiSlice::recognize(spec.kind, &devices).expect(name);
        assert_eq!(recognized.devices(), job.devices(), "{name} {options}");
        assert_eq!(recognized.slice().shape(), job.slice().shape(), "{name}");
        devices[0].id += 1;
        assert_eq!(MultiSlice::recognize(spec.kind, &devices), None, "{name}");
        compared += 1;
    }
    assert_eq!(compared, 60);
}

#[test]
fn legal_slices_equal_tables() {
    let tables: Value =
        serde_json::from_str(include_str!("../testdata/legal_slices.json")).unwrap();
    for generation in Generation::ALL {
        let theirs: BTreeSet<_> = tables[generation.spec().name]
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| (array3(&entry[0]), flags3(&entry[1]), entry[2] == 1))
            .collect();
        let ours: BTreeSet<_> = generation
            .legal_slices()
            .into_iter()
            .map(|slice| (slice.shape.extents(), slice.wrap, slice.twisted))
            .collect();
        assert_eq!(ours, theirs, "{generation}");
        assert_eq!(
            ours.len(),
            generation.legal_slices().len(),
            "{generation}: no duplicates"
        );
    }
}

#[test]
fn dma_reach_equals_limited_ici() {
    for dump in lines(include_str!("../testdata/limited_ici.jsonl")) {
        let slice: Slice = dump["name"].as_str().unwrap().parse().unwrap();
        let slice = slice.with_wrap(flags3(&dump["wrap"])).unwrap();
        let reachable: Vec<Vec<u32>> = serde_json::from_value(dump["reachable"].clone()).unwrap();
        for (coord, theirs) in slice.shape().coords().zip(&reachable) {
            let chip = |coord: Coord| slice.shape().chip(coord).0;
            let ours: Vec<_> = slice.dma_reach(coord).into_iter().map(chip).collect();
            assert_eq!(&ours, theirs, "{slice} {coord}");
        }
    }
}

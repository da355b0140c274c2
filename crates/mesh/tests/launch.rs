//! Launch plans against the values that TorchTPU and Ray set for the same slices.

use std::collections::HashMap;

use tpu_dist_mesh::{
    MultiSlice,
    launch::{self, Options, Processes},
};

fn environment(process: &launch::Process) -> HashMap<&str, &str> {
    process
        .environment
        .iter()
        .map(|(name, value)| (*name, value.as_str()))
        .collect()
}

#[test]
fn one_process_a_chip() {
    // v6e 2x4 on two hosts of four chips, as TorchTPU's launcher sets it with base port 8070.
    let job: MultiSlice = "v6e:2x4".parse().unwrap();
    let options = Options {
        port: 8070,
        ..Options::default()
    };
    let processes = launch::plan(&job, &["10.0.0.2", "10.0.0.1"], &options).unwrap();
    assert_eq!(processes.len(), 8);
    let addresses = "10.0.0.2:8070,10.0.0.2:8071,10.0.0.2:8072,10.0.0.2:8073,\
                     10.0.0.1:8070,10.0.0.1:8071,10.0.0.1:8072,10.0.0.1:8073";
    let env = environment(&processes[5]);
    for (name, value) in [
        ("TPU_VISIBLE_CHIPS", "1"),
        ("TPU_PROCESS_PORT", "8071"),
        ("TPU_PROCESS_ADDRESSES", addresses),
        ("CLOUD_TPU_TASK_ID", "5"),
        ("TPU_WORKER_HOSTNAMES", "10.0.0.2,10.0.0.1"),
        ("TPU_WORKER_ID", "1"),
        ("TPU_HOST_BOUNDS", "2,4,1"),
        ("TPU_CHIPS_PER_HOST_BOUNDS", "1,1,1"),
        ("TPU_PROCESS_BOUNDS", "2,4,1"),
        ("TPU_CHIPS_PER_PROCESS_BOUNDS", "1,1,1"),
        ("TPU_ACCELERATOR_TYPE", "v6e-8"),
    ] {
        assert_eq!(env.get(name), Some(&value), "{name}");
    }
    assert!(!env.keys().any(|name| name.starts_with("MEGASCALE")));
    assert!(processes[5].environment.is_sorted());
    let devices = job.devices();
    for process in &processes {
        let device = devices[process.ranks.start as usize];
        assert_eq!(
            (device.coords, device.process),
            (process.coords[0], process.host)
        );
    }
}

#[test]
fn one_process_a_host() {
    // A v4-256 host as Cloud TPU's own metadata describes it.
    let job: MultiSlice = "v4-256".parse().unwrap();
    let hosts: Vec<String> = (0..32).map(|host| format!("w{host}")).collect();
    let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
    let options = Options {
        processes: Processes::PerHost,
        ..Options::default()
    };
    let processes = launch::plan(&job, &hosts, &options).unwrap();
    assert_eq!(processes.len(), 32);
    let env = environment(&processes[3]);
    for (name, value) in [
        ("TPU_ACCELERATOR_TYPE", "v4-256"),
        ("TPU_PROCESS_BOUNDS", "2,2,8"),
        ("TPU_CHIPS_PER_PROCESS_BOUNDS", "2,2,1"),
        ("TPU_TOPOLOGY", "4x4x8"),
        ("TPU_TOPOLOGY_WRAP", "true,true,true"),
        ("TPU_VISIBLE_CHIPS", "0,1,2,3"),
        ("TPU_WORKER_ID", "3"),
        ("TPU_PROCESS_PORT", "8471"),
    ] {
        assert_eq!(env.get(name), Some(&value), "{name}");
    }
    assert_eq!(processes[3].ranks, 12..16);
}

#[test]
fn several_slices() {
    let job: MultiSlice = "2*v7x:2x2x1".parse().unwrap();
    let processes = launch::plan(&job, &["fd00::1", "[fd00::2]"], &Options::default()).unwrap();
    assert_eq!(processes.len(), 8);
    // A v7x chip has two devices, so a process has two ranks.
    assert_eq!(processes[4].ranks, 8..10);
    let env = environment(&processes[4]);
    for (name, value) in [
        ("MEGASCALE_COORDINATOR_ADDRESS", "[fd00::1]:8081"),
        ("MEGASCALE_NUM_SLICES", "2"),
        ("MEGASCALE_SLICE_ID", "1"),
        ("MEGASCALE_PORT", "8081"),
        ("TPU_WORKER_HOSTNAMES", "[fd00::2]"),
        ("TPU_WORKER_ID", "0"),
        ("CLOUD_TPU_TASK_ID", "0"),
    ] {
        assert_eq!(env.get(name), Some(&value), "{name}");
    }
    assert!(env["TPU_PROCESS_ADDRESSES"].starts_with("[fd00::2]:8471,[fd00::2]:8472"));
}

#[test]
fn errors_name_the_argument() {
    let job: MultiSlice = "v5p:2x2x2".parse().unwrap();
    let high = Options {
        port: 65533,
        ..Options::default()
    };
    for (hosts, options, words) in [
        (
            &["a"][..],
            Options::default(),
            "hosts: v5p:2x2x2 has 2 hosts, got 1",
        ),
        (
            &["a", "a"],
            Options::default(),
            "hosts: \"a\" is there twice",
        ),
        (
            &["a", "b:80"],
            Options::default(),
            "hosts: expected an address without port, got \"b:80\"",
        ),
        (
            &["a", ""],
            Options::default(),
            "hosts: expected one address, got \"\"",
        ),
        (
            &["a", "b"],
            high,
            "port: 65533 leaves no room for 4 processes a host",
        ),
    ] {
        let error = launch::plan(&job, hosts, &options).unwrap_err().to_string();
        assert_eq!(error, words);
    }
}

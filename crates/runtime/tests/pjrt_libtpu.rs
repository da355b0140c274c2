//! The PJRT bindings on libtpu, which compiles for TPUs on machines that have none.
//!
//! libtpu reads its environment while it is loaded, and may bring its process down, so
//! the work is done in a child: this binary again, told which test to run.

mod pjrt_support;

use std::collections::BTreeSet;
use std::env;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tpu_dist_runtime::pjrt::{Client, Code, CompileOptions, Plugin, Topology, Value};

const CHILD: &str = "TPU_DIST_TEST_LIBTPU_CHILD";

#[test]
fn compiles_for_tpus_that_are_not_there() {
    let Some(path) = pjrt_support::libtpu() else {
        return;
    };
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "in_the_child", "--ignored", "--nocapture"])
        .env(CHILD, path)
        .env("TPU_SKIP_MDS_QUERY", "1")
        .env("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(300);
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("libtpu took more than 300 s");
        }
        thread::sleep(Duration::from_millis(20));
    };
    assert!(status.success(), "{status}");
}

#[test]
#[ignore = "run by compiles_for_tpus_that_are_not_there"]
fn in_the_child() {
    let Some(path) = env::var_os(CHILD) else {
        return;
    };
    let plugin = Plugin::load(path).unwrap();
    println!("{plugin:?} {:?}", plugin.attributes());

    // 2 x 2 chips of one core each, wrapped nowhere.
    let wrap = ("wrap", Value::from(vec![0, 0, 0]));
    let topology = Topology::create(plugin, "v5p:2x2x1", &[wrap]).unwrap();
    assert_eq!(topology.platform().unwrap(), "tpu");
    let devices = topology.devices().unwrap();
    let coords: BTreeSet<_> = devices
        .iter()
        .map(|device| match &device.attributes["coords"] {
            Value::IntList(coords) => (device.id, coords.clone()),
            other => panic!("{other:?}"),
        })
        .collect();
    let expected = [
        (0, [0, 0, 0]),
        (1, [1, 0, 0]),
        (2, [0, 1, 0]),
        (3, [1, 1, 0]),
    ];
    assert_eq!(
        coords,
        expected.map(|(id, coords)| (id, coords.to_vec())).into()
    );
    assert!(
        devices.iter().all(|device| device.kind.contains("TPU v5")),
        "{devices:?}"
    );

    // The fingerprint tells topologies apart.
    let fingerprint = |name: &str| {
        Topology::create(plugin, name, &[])
            .unwrap()
            .fingerprint()
            .unwrap()
    };
    assert_eq!(topology.fingerprint().unwrap(), fingerprint("v5p:2x2x1"));
    assert_ne!(fingerprint("v5p:2x2x1"), fingerprint("v5p:2x2x2"));
    assert_ne!(fingerprint("v5p:2x2x1"), fingerprint("v4:2x2x1"));

    let sum = "module @sum attributes {mhlo.num_partitions = 4 : i32} {
        func.func public @main(%a: tensor<1024x1024xbf16>) -> tensor<1024x1024xbf16> {
          %0 = \"stablehlo.all_reduce\"(%a) ({
            ^bb0(%x: tensor<bf16>, %y: tensor<bf16>):
              %s = stablehlo.add %x, %y : tensor<bf16>
              stablehlo.return %s : tensor<bf16>
          }) {replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>,
              channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
              use_global_device_ids} : (tensor<1024x1024xbf16>) -> tensor<1024x1024xbf16>
          return %0 : tensor<1024x1024xbf16>
        }
      }";
    let options = CompileOptions {
        num_partitions: 4,
        use_spmd_partitioning: true,
        device_assignment: vec![vec![0, 1, 3, 2]],
        ..CompileOptions::default()
    };
    let start = Instant::now();
    let program = topology.compile(sum.as_bytes(), &options).unwrap();
    println!("compiled an all_reduce in {:?}", start.elapsed());
    assert_eq!(program.num_outputs().unwrap(), 1);
    assert_eq!(program.outputs().unwrap()[0].dims[..], [1024, 1024]);
    assert!(!program.fingerprint().unwrap().is_empty());
    assert!(!program.serialize().unwrap().is_empty());
    assert_eq!(program.memory().unwrap().outputs, 2 << 20);
    assert!(
        program
            .cost_analysis()
            .unwrap()
            .contains_key("bytes accessed")
    );
    let (format, code) = program.optimized_program().unwrap();
    println!("optimized: {} bytes of {format}", code.len());
    // Names inside the protobuf are plain text.
    assert!(code.windows(10).any(|window| window == b"all-reduce"));

    for (name, options) in [
        ("v5p:nonsense", vec![]),
        ("v9:2x2x1", vec![]),
        ("v5p:2x2x1", vec![("no_such_option", Value::from(1))]),
    ] {
        let error = Topology::create(plugin, name, &options).unwrap_err();
        println!("{name} {options:?}: {error}");
        assert!(matches!(
            error.code(),
            Code::InvalidArgument | Code::NotFound | Code::Unknown
        ));
    }
    let error = topology
        .compile(b"module {", &CompileOptions::default())
        .unwrap_err();
    assert!(
        error.to_string().contains("expected operation name"),
        "{error}"
    );
    let twice = CompileOptions {
        device_assignment: vec![vec![0, 1, 1, 2]],
        ..options
    };
    let error = topology.compile(sum.as_bytes(), &twice).unwrap_err();
    assert!(error.to_string().contains("device 1 twice"), "{error}");

    // There is no TPU to open; if there is, this is not the machine this test is for.
    match Client::create(plugin, &[]) {
        Ok(client) => println!("a TPU is here: {client:?}"),
        Err(error) => assert_eq!(error.code(), Code::NotFound, "{error}"),
    }
}

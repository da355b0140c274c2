//! The programs of all operators, compiled for a TPU by libtpu, which needs none.
//!
//! libtpu may bring its process down, so children do the work: this binary again, each with
//! a part of the samples.

mod aten_samples;
mod pjrt_support;

use std::env;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tpu_dist_runtime::aten;
use tpu_dist_runtime::pjrt::{Plugin, Topology, Value};

const PLUGIN: &str = "TPU_DIST_TEST_LIBTPU_CHILD";
const PART: &str = "TPU_DIST_TEST_LIBTPU_PART";
const PARTS: usize = 2;

/// Samples that libtpu does not compile, and why.
const REFUSED: &[(&str, &str)] = &[];

#[test]
fn every_row_compiles_for_a_tpu() {
    let Some(path) = pjrt_support::libtpu() else {
        return;
    };
    let mut children: Vec<Child> = (0..PARTS)
        .map(|part| {
            Command::new(env::current_exe().unwrap())
                .args(["--exact", "in_the_child", "--ignored", "--nocapture"])
                .env(PLUGIN, &path)
                .env(PART, part.to_string())
                .env("TPU_SKIP_MDS_QUERY", "1")
                .env("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
                .stdin(Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    let deadline = Instant::now() + Duration::from_secs(300);
    let mut failed = Vec::new();
    for child in &mut children {
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                if !status.success() {
                    failed.push(status.to_string());
                }
                break;
            }
            if Instant::now() > deadline {
                child.kill().unwrap();
                failed.push(format!("more than 300 s: {}", child.wait().unwrap()));
                break;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

#[test]
#[ignore = "run by every_row_compiles_for_a_tpu"]
fn in_the_child() {
    let (Some(path), Ok(part)) = (env::var_os(PLUGIN), env::var(PART)) else {
        return;
    };
    let plugin = Plugin::load(path).unwrap();
    let wrap = ("wrap", Value::from(vec![0, 0, 0]));
    let topology = Topology::create(plugin, "v5e:2x2", &[wrap]).unwrap();
    let options = aten::compile_options(0);
    let start = Instant::now();
    let part: usize = part.parse().unwrap();
    let mut count = 0;
    let mut failures = Vec::new();
    for line in aten_samples::samples().skip(part).step_by(PARTS) {
        let request = aten_samples::parse(line);
        let lowered = aten::lower(&request).unwrap().unwrap();
        let known = REFUSED.iter().find(|(sample, _)| *sample == line);
        // What brings the process down is the last line that it wrote.
        println!("{part}: {line}");
        let begun = Instant::now();
        match (topology.compile(lowered.text.as_bytes(), &options), known) {
            (Ok(_), None) | (Err(_), Some(_)) => {}
            (Ok(_), Some((_, reason))) => {
                failures.push(format!("{line}: compiles, without {reason}"))
            }
            (Err(error), None) => failures.push(format!("{line}\n{error}\n{}", lowered.text)),
        }
        if begun.elapsed() > Duration::from_secs(2) {
            println!("{part}: that took {:?}", begun.elapsed());
        }
        count += 1;
    }
    println!("{part}: {count} programs in {:?}", start.elapsed());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

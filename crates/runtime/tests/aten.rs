//! ATen operators lowered to StableHLO, compiled and run on the CPU plugins installed here.

mod aten_samples;
mod pjrt_support;

use std::collections::BTreeSet;

use tpu_dist_runtime::aten::{self, Lowered, Request};
use tpu_dist_runtime::executor::{Config, Executor};
use tpu_dist_runtime::pjrt::{Buffer, ElementType, LaunchOptions};

fn executors() -> Vec<Executor> {
    pjrt_support::cpu_plugins()
        .iter()
        .map(|plugin| Executor::open(&Config::new(plugin.path())).unwrap())
        .collect()
}

fn lower(request: &Request<'_>) -> Lowered {
    aten::lower(request)
        .expect("a row")
        .unwrap_or_else(|error| panic!("{error}: {request:?}"))
}

#[test]
fn every_row_has_a_sample() {
    let sampled: BTreeSet<&str> = aten_samples::samples()
        .map(|line| line.split(' ').next().unwrap())
        .collect();
    let rows: BTreeSet<&str> = aten::operators().map(|row| row.name).collect();
    assert_eq!(sampled, rows);
}

/// Compiles and runs each sample on zeros: programs are well-formed, and of the types they claim.
#[test]
fn every_row_runs() {
    for executor in executors() {
        let mut failures = Vec::new();
        for line in aten_samples::samples() {
            let request = aten_samples::parse(line);
            let lowered = lower(&request);
            if let Err(error) = run_on_zeros(&executor, &request, &lowered) {
                failures.push(format!("{line}\n{error}\n{}", lowered.text));
            }
        }
        assert!(failures.is_empty(), "{}", failures.join("\n"));
    }
}

fn run_on_zeros(
    executor: &Executor,
    request: &Request<'_>,
    lowered: &Lowered,
) -> Result<(), String> {
    let program = executor
        .compile(request.operator, lowered.text.as_bytes())
        .map_err(|error| error.to_string())?;
    let zeros = |element: ElementType, dims: &[i64]| {
        let count: i64 = dims.iter().product();
        let bytes = vec![0; count as usize * element.size()];
        executor.upload(&bytes, element, dims).unwrap()
    };
    let storages = request
        .storages
        .iter()
        .map(|ty| zeros(ty.element, &ty.dims));
    let scalars = lowered.scalars.iter().map(|&element| zeros(element, &[]));
    let state = lowered.random.then(|| zeros(ElementType::U64, &[2]));
    let buffers: Vec<Buffer> = storages.chain(scalars).chain(state).collect();
    let references: Vec<&Buffer> = buffers.iter().collect();
    let outputs = executor
        .launch(&program, &references, LaunchOptions::default())
        .map_err(|error| error.to_string())?;
    executor
        .synchronize(None)
        .map_err(|error| error.to_string())?;
    let types: Vec<_> = (outputs.iter())
        .map(|output| {
            (
                output.element_type().unwrap(),
                output.dims().unwrap().to_vec(),
            )
        })
        .collect();
    if types != lowered.types {
        return Err(format!("{types:?} are not {:?}", lowered.types));
    }
    Ok(())
}

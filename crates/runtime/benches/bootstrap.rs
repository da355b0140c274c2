//! Time to bring a world of processes together, and to split a group off it.
//!
//! `cargo bench -p tpu-dist-runtime --bench bootstrap -- [--ranks 2,8,16]`. Rank 0 prints how
//! long [`Communicator::create`] took there, from a moment at which all processes run,
//! and the median over 200 splits with one collective each.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tpu_dist_collectives::{DType, Kind};
use tpu_dist_runtime::{Call, Communicator, DirectoryStore, GroupSpec};

const SPLITS: u32 = 200;

fn main() {
    if let Ok(rank) = std::env::var("TPU_DIST_TEST_RANK") {
        run(rank.parse().expect("set by the parent"));
        return;
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let at = arguments.iter().position(|argument| argument == "--ranks");
    let worlds = at.and_then(|at| arguments.get(at + 1));
    println!("{:>6} {:>12} {:>12}", "ranks", "create ms", "split us");
    for ranks in worlds.map_or("2,8,16", String::as_str).split(',') {
        let ranks: u32 = ranks.parse().expect("--ranks are numbers");
        let directory =
            std::env::temp_dir().join(format!("tpu_dist-bootstrap-{}-{ranks}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory for the store");
        let start = |rank: u32| {
            Command::new(std::env::current_exe().expect("own path"))
                .env("TPU_DIST_TEST_RANK", rank.to_string())
                .env("TPU_DIST_TEST_SIZE", ranks.to_string())
                .env("TPU_DIST_TEST_STORE", &directory)
                .spawn()
                .expect("a rank starts")
        };
        let processes: Vec<_> = (0..ranks).map(start).collect();
        for mut process in processes {
            assert!(process.wait().expect("a rank ends").success());
        }
        let _ = std::fs::remove_dir_all(&directory);
    }
}

/// Waits until every rank's process runs.
fn await_all(directory: &Path, rank: u32, ranks: u32) {
    std::fs::write(directory.join(format!("here-{rank}")), "").expect("the store is writable");
    for other in 0..ranks {
        while !directory.join(format!("here-{other}")).exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn run(rank: u32) {
    let variable = |name| std::env::var(name).expect("set by the parent");
    let ranks: u32 = variable("TPU_DIST_TEST_SIZE").parse().expect("a number");
    let directory = PathBuf::from(variable("TPU_DIST_TEST_STORE"));
    let spec = |id: &str, default| GroupSpec {
        id: id.into(),
        name: "bench".into(),
        rank,
        size: ranks,
        global_ranks: (0..ranks).collect(),
        default,
        timeout: Duration::from_secs(60),
    };
    await_all(&directory, rank, ranks);
    let begin = Instant::now();
    let world = Communicator::create(spec("0", true), Arc::new(DirectoryStore::new(directory)))
        .expect("the world meets");
    let create = begin.elapsed();
    let barrier = |group: &Communicator| {
        let call = Call::new(Kind::Barrier, DType::U8);
        // SAFETY: no memory is involved.
        let operation = unsafe { group.collective(call, None) }.expect("the call is right");
        operation.wait(None).expect("all ranks come");
    };
    barrier(&world);
    let mut splits: Vec<f64> = (0..SPLITS)
        .map(|number| {
            let begin = Instant::now();
            let group = world
                .split(spec(&format!("split {number}"), false))
                .expect("members of the world");
            barrier(&group);
            begin.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    splits.sort_by(f64::total_cmp);
    if rank == 0 {
        let create = create.as_secs_f64() * 1e3;
        let split = splits[splits.len() / 2];
        println!("{ranks:>6} {create:>12.2} {split:>12.1}");
    }
    world.shutdown();
}

//! What the executor adds to PJRT's own cost of a launch, and what compiling costs.
//!
//! The rival is a bare call of the C API with nothing of ours around it. Both run the
//! same program in turns, so that the machine's moods hit both; each call is timed by
//! itself, so that a call during which the thread lost its core does not count for others.

use std::env;
use std::hint::black_box;
use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tpu_dist_runtime::compile_cache;
use tpu_dist_runtime::executor::{Config, Executor, Program};
use tpu_dist_runtime::pjrt::{Buffer, ElementType, LaunchOptions, Plugin, sys};

const LAUNCHES: usize = 20_000;

/// PJRT's part alone: execute with an event, find the event ready, free everything.
fn bare(program: &Program, arguments: &[*mut sys::Buffer], outputs: &mut [*mut sys::Buffer]) {
    let executable = program.executable();
    let plugin = executable.client().plugin();
    let mut options = sys::ExecuteOptions::new();
    let lists = [arguments.as_ptr()];
    let rooms = [outputs.as_mut_ptr()];
    let mut event = ptr::null_mut();
    let mut args = sys::LoadedExecutableExecute::new();
    args.executable = executable.as_ptr();
    args.options = &mut options;
    args.argument_lists = lists.as_ptr();
    args.num_devices = 1;
    args.num_args = arguments.len();
    args.output_lists = rooms.as_ptr();
    args.device_complete_events = &mut event;
    // SAFETY: the arguments are live buffers of the program's client, there is room for
    // its outputs, and outputs and event are freed once.
    unsafe {
        plugin.call(&mut args).expect("execute");
        let mut wait = sys::EventAwait::new();
        wait.event = event;
        plugin.call(&mut wait).expect("await");
        let mut free = sys::EventDestroy::new();
        free.event = event;
        plugin.call(&mut free).expect("free");
        for output in outputs {
            let mut free = sys::BufferDestroy::new();
            free.buffer = *output;
            plugin.call(&mut free).expect("free");
        }
    }
}

/// Times of one call for two rivals, called in turns: tenth percentile and median.
fn compare(mut one: impl FnMut(), mut other: impl FnMut()) -> [(Duration, Duration); 2] {
    let time = |work: &mut dyn FnMut()| {
        let start = Instant::now();
        work();
        start.elapsed()
    };
    let mut times: (Vec<_>, Vec<_>) = (0..LAUNCHES)
        .map(|_| (time(&mut one), time(&mut other)))
        .unzip();
    times.0.sort_unstable();
    times.1.sort_unstable();
    [LAUNCHES / 10, LAUNCHES / 2].map(|rank| (times.0[rank], times.1[rank]))
}

/// A program of `count` arguments that returns each, plus the first.
fn program(count: usize) -> String {
    let list = |of: &dyn Fn(usize) -> String| (0..count).map(of).collect::<Vec<_>>().join(", ");
    let adds: String = (0..count)
        .map(|i| format!("%r{i} = stablehlo.add %a{i}, %a0 : tensor<4xf32>\n"))
        .collect();
    let types = list(&|_| "tensor<4xf32>".to_string());
    format!(
        "module @add {{ func.func @main({}) -> ({types}) {{ {adds} return {} : {types} }} }}",
        list(&|i| format!("%a{i}: tensor<4xf32>")),
        list(&|i| format!("%r{i}")),
    )
}

fn launch(executor: &Executor, count: usize) {
    let program: Arc<Program> = executor
        .compile("add", program(count).as_bytes())
        .expect("compile");
    let buffers: Vec<Buffer> = (0..count)
        .map(|_| {
            executor
                .upload(&[0; 16], ElementType::F32, &[4])
                .expect("upload")
        })
        .collect();
    let arguments: Vec<&Buffer> = buffers.iter().collect();
    let raw: Vec<_> = buffers.iter().map(Buffer::as_ptr).collect();
    let mut outputs = vec![ptr::null_mut(); count];
    let times = compare(
        || bare(&program, &raw, &mut outputs),
        || {
            let options = LaunchOptions::default();
            black_box(
                executor
                    .launch(&program, &arguments, options)
                    .expect("launch"),
            );
        },
    );
    for (name, (pjrt, ours)) in ["p10", "median"].into_iter().zip(times) {
        let [pjrt, ours] = [pjrt, ours].map(|time| time.as_secs_f64() * 1e6);
        println!(
            "launch, {count} in, {count} out, {name}: \
             PJRT {pjrt:.3} us, executor {ours:.3} us, added {:+.3} us",
            ours - pjrt
        );
    }
}

fn compile(config: &Config) {
    let time = |executor: &Executor, what: &str| {
        let start = Instant::now();
        executor
            .compile("add", program(2).as_bytes())
            .expect("compile");
        println!(
            "compile, {what}: {:.1} us",
            start.elapsed().as_secs_f64() * 1e6
        );
    };
    let open = || {
        let start = Instant::now();
        let executor = Executor::open(config).expect("open");
        (executor, start.elapsed())
    };
    let (executor, opened) = open();
    println!(
        "open, hashing the plugin: {:.1} ms",
        opened.as_secs_f64() * 1e3
    );
    time(&executor, "anew");
    let text = program(2);
    let mut times: Vec<_> = (0..1000)
        .map(|_| {
            let start = Instant::now();
            black_box(executor.compile("add", text.as_bytes()).expect("compile"));
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    println!(
        "compile, from memory, median: {:.2} us",
        times[500].as_secs_f64() * 1e6
    );
    let (executor, opened) = open();
    println!(
        "open, the plugin's hash known: {:.1} ms",
        opened.as_secs_f64() * 1e3
    );
    time(&executor, "from disk");
}

fn main() {
    let Some(plugins) = env::var_os("TPU_DIST_PJRT_PLUGIN") else {
        println!("skipped: TPU_DIST_PJRT_PLUGIN names no CPU plugin");
        return;
    };
    for path in env::split_paths(&plugins) {
        let plugin = Plugin::load(&path).expect("a plugin");
        let (major, minor) = plugin.version();
        println!("{} (PJRT {major}.{minor})", path.display());
        let directory: PathBuf =
            env::temp_dir().join(format!("tpu-dist-bench-{}-{minor}", std::process::id()));
        let mut config = Config::new(&path);
        config.cache = compile_cache::Config {
            directory: Some(directory.clone()),
            ..compile_cache::Config::default()
        };
        compile(&config);
        let executor = Executor::open(&config).expect("open");
        for count in [2, 8, 32] {
            launch(&executor, count);
        }
        let _ = std::fs::remove_dir_all(directory);
    }
}

//! The eager executor on the CPU plugins installed here.

mod pjrt_support;

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use pjrt_support::{Aligned, add, bytes, cpu_plugins, floats, footprint, square};
use tpu_dist_runtime::executor::{Config, Error, Executor, HostWork};
use tpu_dist_runtime::pjrt::sys::BufferDonateWithControlDependency;
use tpu_dist_runtime::pjrt::{Buffer, Code, ElementType, LaunchOptions, Outputs, Plugin, Value};

fn config(plugin: Plugin) -> Config {
    Config::new(plugin.path())
}

/// Plugins on which buffers can wait for the host.
fn waiting_plugins() -> Vec<Plugin> {
    let mut plugins = cpu_plugins();
    plugins.retain(|plugin| plugin.has::<BufferDonateWithControlDependency>());
    if plugins.is_empty() {
        println!("skipped: no plugin here lets buffers wait");
    }
    plugins
}

fn upload(executor: &Executor, values: &[f32]) -> Buffer {
    executor
        .upload(&bytes(values), ElementType::F32, &[values.len() as i64])
        .unwrap()
}

fn download(executor: &Executor, buffer: &Buffer) -> Result<Vec<f32>, Error> {
    let mut out = vec![0; buffer.host_bytes().unwrap()];
    executor.download(buffer, &mut out).map(|()| floats(&out))
}

/// Hands `work` to the test.
fn capture(
    executor: &Executor,
    name: &str,
    buffers: Vec<Buffer>,
) -> (Outputs, mpsc::Receiver<HostWork>) {
    let (sender, receiver) = mpsc::channel();
    let successors = executor
        .host_work(name, buffers.into(), move |work| sender.send(work).unwrap())
        .unwrap();
    (successors, receiver)
}

fn soon(receiver: &mpsc::Receiver<HostWork>) -> HostWork {
    receiver.recv_timeout(Duration::from_secs(60)).unwrap()
}

#[expect(
    clippy::mut_from_ref,
    reason = "the memory is the buffer's, which nothing else uses"
)]
fn contents(work: &HostWork, index: usize) -> &mut [f32] {
    let segment = work.memory().unwrap()[index];
    // SAFETY: the work is the test's alone, its buffers hold floats.
    unsafe { std::slice::from_raw_parts_mut(segment.ptr.cast(), segment.bytes / 4) }
}

#[test]
fn programs_take_effect_in_order() {
    for plugin in cpu_plugins() {
        let mut config = config(plugin);
        config.client_options = vec![("cpu_device_count".to_string(), Value::from(2))];
        config.device = 1;
        let executor = Executor::open(&config).unwrap();
        assert_eq!(executor.device().description().unwrap().id, 1);
        let program = executor.compile("add", add(4, true).as_bytes()).unwrap();
        assert_eq!(program.name(), "add");
        let step = upload(&executor, &[1., 2., 3., 4.]);
        let mut value = upload(&executor, &[0.; 4]);
        for _ in 0..1000 {
            let mut outputs = executor
                .launch(&program, &[&value, &step], LaunchOptions::default())
                .unwrap();
            value = outputs.remove(0);
        }
        assert_eq!(executor.launched(), 1000);
        executor.synchronize(None).unwrap();
        assert_eq!(
            download(&executor, &value).unwrap(),
            [1000., 2000., 3000., 4000.]
        );
        // The same program again comes from the cache.
        executor.compile("again", add(4, true).as_bytes()).unwrap();
        let stats = executor.cache().stats();
        assert_eq!(
            (stats.misses, stats.memory_hits, stats.disk_hits),
            (1, 1, 0)
        );
    }
}

#[test]
fn launches_return_before_the_work_is_done() {
    for plugin in cpu_plugins() {
        let mut config = config(plugin);
        config.max_in_flight = 3;
        let executor = Executor::open(&config).unwrap();
        let n = 500;
        let program = executor.compile("square", square(n).as_bytes()).unwrap();
        let ones = bytes(&vec![1.; n * n]);
        let matrix = executor
            .upload(&ones, ElementType::F32, &[n as i64; 2])
            .unwrap();
        let launch = |matrix: &Buffer| {
            executor
                .launch(&program, &[matrix], LaunchOptions::default())
                .unwrap()
                .remove(0)
        };
        executor.synchronize(None).unwrap();
        let start = Instant::now();
        let first = launch(&matrix);
        let returned = start.elapsed();
        let marker = executor.record();
        let rest: Vec<_> = (0..9).map(|_| launch(&matrix)).collect();
        executor.wait(&marker, None).unwrap();
        assert!(first.ready().unwrap().is_ready() && marker.is_complete());
        let waited = start.elapsed();
        executor.synchronize(Some(Duration::from_secs(60))).unwrap();
        assert!(rest.iter().all(|buffer| buffer.ready().unwrap().is_ready()));
        println!("{plugin:?}: returned after {returned:?}, done after {waited:?}");
        assert_eq!(download(&executor, &rest[8]).unwrap()[n * n - 1], n as f32);
    }
}

#[test]
fn errors_name_the_operation() {
    for plugin in cpu_plugins() {
        for blocking in [false, true] {
            let mut config = config(plugin);
            config.blocking = blocking;
            let executor = Executor::open(&config).unwrap();
            let error = executor.compile("aten::broken", b"module {").unwrap_err();
            assert!(
                matches!(&error, Error::Compile { program, .. } if &**program == "aten::broken")
            );
            assert!(
                error.to_string().contains("expected operation name"),
                "{error}"
            );
            let program = executor
                .compile("aten::add", add(4, false).as_bytes())
                .unwrap();
            let (four, five) = (upload(&executor, &[0.; 4]), upload(&executor, &[0.; 5]));
            let error = executor
                .launch(&program, &[&four, &five], LaunchOptions::default())
                .unwrap_err();
            assert!(error.to_string().starts_with("aten::add: "), "{error}");
            assert_eq!(error.code(), Some(Code::InvalidArgument));
            let error = executor.download(&four, &mut [0; 3]).unwrap_err();
            assert_eq!(error.code(), Some(Code::InvalidArgument), "{error}");
            executor.synchronize(None).unwrap();
        }
        let mut config = config(plugin);
        config.client_options = vec![("cpu_device_count".to_string(), Value::from(1))];
        config.device = 1;
        let error = Executor::open(&config).unwrap_err();
        assert!(
            matches!(error, Error::NoDevice { index: 1, count: 1 }),
            "{error}"
        );
    }
    let error = Executor::open(&Config::new("/nonexistent.so")).unwrap_err();
    assert!(error.to_string().contains("/nonexistent.so"), "{error}");
}

#[test]
fn the_host_works_between_programs() {
    for plugin in waiting_plugins() {
        let executor = Executor::open(&config(plugin)).unwrap();
        let n = 300;
        let slow = executor.compile("square", square(n).as_bytes()).unwrap();
        let n_squared = n * n;
        let sum = executor.compile("add", add(4, false).as_bytes()).unwrap();
        let launch = |program, arguments: &[&Buffer]| {
            executor
                .launch(program, arguments, LaunchOptions::default())
                .unwrap()
                .remove(0)
        };

        // The host sees what the program before it made, though it takes a while.
        let ones = bytes(&vec![1.; n_squared]);
        let matrix = executor
            .upload(&ones, ElementType::F32, &[n as i64; 2])
            .unwrap();
        let product = launch(&slow, &[&matrix]);
        let small = upload(&executor, &[1., 2., 3., 4.]);
        let reader = launch(&sum, &[&small, &small]);
        let (mut after, receiver) = capture(&executor, "all_reduce", vec![product, small]);
        // Programs behind it can be launched meanwhile.
        let last = launch(&sum, &[&after[1], &after[1]]);
        let work = soon(&receiver);
        assert_eq!(contents(&work, 0), vec![n as f32; n_squared]);
        assert_eq!(contents(&work, 1), [1., 2., 3., 4.]);
        // Those before it have read what it now overwrites.
        contents(&work, 0).fill(7.);
        contents(&work, 1).copy_from_slice(&[10., 20., 30., 40.]);
        let marker = executor.record();
        thread::sleep(Duration::from_millis(10));
        assert!(!marker.is_complete() && !last.ready().unwrap().is_ready());
        let error = executor
            .synchronize(Some(Duration::from_millis(10)))
            .unwrap_err();
        assert!(matches!(&error, Error::Timeout { operation, .. } if &**operation == "all_reduce"));
        assert!(
            error
                .to_string()
                .contains("all_reduce has not ended after 10ms"),
            "{error}"
        );
        work.finish(Ok(()));
        assert_eq!(download(&executor, &last).unwrap(), [20., 40., 60., 80.]);
        assert_eq!(download(&executor, &reader).unwrap(), [2., 4., 6., 8.]);
        assert_eq!(download(&executor, &after[0]).unwrap(), vec![7.; n_squared]);
        executor.synchronize(None).unwrap();

        // Two in a row come in order, however long the first takes.
        let (next, first) = capture(&executor, "first", vec![after.remove(1)]);
        let (next, second) = capture(&executor, "second", next.into_vec());
        let work = soon(&first);
        thread::sleep(Duration::from_millis(10));
        assert!(second.try_recv().is_err());
        contents(&work, 0).fill(1.);
        work.finish(Ok(()));
        let work = soon(&second);
        assert_eq!(contents(&work, 0), [1.; 4]);
        work.finish(Ok(()));
        executor.synchronize(None).unwrap();
        assert_eq!(download(&executor, &next[0]).unwrap(), [1.; 4]);
    }
}

#[test]
fn failures_surface_at_the_next_synchronisation() {
    type Surface = fn(&Executor, &Buffer) -> Result<(), Error>;
    let surfaces: [(&str, Surface); 3] = [
        ("synchronize", |executor, _| executor.synchronize(None)),
        ("download", |executor, buffer| {
            download(executor, buffer).map(drop)
        }),
        ("a later launch", |executor, buffer| {
            let program = executor.compile("later", add(4, false).as_bytes())?;
            executor
                .launch(&program, &[buffer, buffer], LaunchOptions::default())
                .map(drop)?;
            executor.synchronize(None)
        }),
    ];
    for plugin in waiting_plugins() {
        let executor = Executor::open(&config(plugin)).unwrap();
        let sum = executor.compile("sum", add(4, false).as_bytes()).unwrap();
        for (name, surface) in surfaces {
            let (after, receiver) =
                capture(&executor, "all_reduce", vec![upload(&executor, &[1.; 4])]);
            let arguments = [&after[0], &after[0]];
            let poisoned = executor
                .launch(&sum, &arguments, LaunchOptions::default())
                .unwrap()
                .remove(0);
            soon(&receiver).finish(Err((Code::Aborted, "rank 3 is gone")));
            let error = surface(&executor, &poisoned).unwrap_err();
            let text = error.to_string();
            assert!(
                text.starts_with("all_reduce: ") && text.contains("rank 3 is gone"),
                "{name}: {text}"
            );
            // The rest is good, and nobody is told twice.
            executor.synchronize(None).unwrap();
            let ones = upload(&executor, &[1.; 4]);
            let good = executor
                .launch(&sum, &[&ones, &ones], LaunchOptions::default())
                .unwrap();
            assert_eq!(download(&executor, &good[0]).unwrap(), [2.; 4], "{name}");
            // Work on what has failed is told so.
            let (after, receiver) = capture(&executor, "next", vec![poisoned]);
            let work = soon(&receiver);
            assert!(
                work.memory()
                    .unwrap_err()
                    .to_string()
                    .contains("rank 3 is gone")
            );
            drop((work, after));
            assert!(
                executor
                    .synchronize(None)
                    .unwrap_err()
                    .to_string()
                    .starts_with("next: ")
            );
        }
    }
}

#[test]
fn blocking_launches_fail_by_themselves() {
    for plugin in waiting_plugins() {
        let mut config = config(plugin);
        config.blocking = true;
        let executor = Executor::open(&config).unwrap();
        let refused = executor
            .host_work(
                "all_reduce",
                vec![upload(&executor, &[1.; 4])].into(),
                |work| {
                    thread::spawn(move || {
                        thread::sleep(Duration::from_millis(5));
                        work.finish(Err((Code::Aborted, "rank 3 is gone")));
                    });
                },
            )
            .unwrap_err();
        assert!(refused.to_string().contains("all_reduce: "), "{refused}");
        assert!(refused.to_string().contains("rank 3 is gone"), "{refused}");
        let sum = executor.compile("sum", add(4, false).as_bytes()).unwrap();
        let poisoned = &refused.buffers[0];
        let error = executor
            .launch(&sum, &[poisoned, poisoned], LaunchOptions::default())
            .unwrap_err();
        assert!(error.to_string().starts_with("sum: "), "{error}");
        executor.synchronize(None).unwrap();
        let ones = upload(&executor, &[1.; 4]);
        let sum = executor
            .launch(&sum, &[&ones, &ones], LaunchOptions::default())
            .unwrap();
        assert!(sum[0].ready().unwrap().is_ready());
    }
}

#[test]
fn refused_work_gives_the_buffers_back() {
    for plugin in cpu_plugins() {
        let executor = Executor::open(&config(plugin)).unwrap();
        let never = |_: HostWork| panic!("called");
        let deleted = upload(&executor, &[1.; 4]);
        deleted.delete().unwrap();
        let buffers = vec![upload(&executor, &[1.; 4]), deleted];
        let refused = executor
            .host_work("work", buffers.into(), never)
            .unwrap_err();
        assert!(refused.to_string().starts_with("work: "), "{refused}");
        assert_eq!(download(&executor, &refused.buffers[0]).unwrap(), [1.; 4]);
        if plugin.has::<BufferDonateWithControlDependency>() {
            // The second is refused when the first has been taken.
            let shared = Aligned::<false>::new(&[2.; 4], 0, &Arc::default());
            let shared = executor
                .import(shared, ElementType::F32, &[4])
                .unwrap()
                .buffer;
            let buffers = vec![upload(&executor, &[1.; 4]), shared];
            let refused = executor
                .host_work("work", buffers.into(), never)
                .unwrap_err();
            assert_eq!(
                refused.error.code(),
                Some(Code::InvalidArgument),
                "{refused}"
            );
            assert_eq!(download(&executor, &refused.buffers[0]).unwrap(), [1.; 4]);
            assert_eq!(download(&executor, &refused.buffers[1]).unwrap(), [2.; 4]);
        } else {
            let buffers = vec![upload(&executor, &[1.; 4])];
            let refused = executor
                .host_work("work", buffers.into(), never)
                .unwrap_err();
            assert_eq!(refused.error.code(), Some(Code::Unimplemented));
            assert_eq!(download(&executor, &refused.buffers[0]).unwrap(), [1.; 4]);
        }
    }
}

#[test]
fn memory_stays_flat() {
    for plugin in cpu_plugins() {
        let mut config = config(plugin);
        config.max_in_flight = 16;
        let executor = Executor::open(&config).unwrap();
        let program = executor.compile("add", add(16, false).as_bytes()).unwrap();
        let one = upload(&executor, &[1.; 16]);
        let run = |operations: usize| {
            let mut value = upload(&executor, &[0.; 16]);
            for _ in 0..operations {
                value = executor
                    .launch(&program, &[&value, &one], LaunchOptions::default())
                    .unwrap()
                    .remove(0);
            }
            assert_eq!(download(&executor, &value).unwrap()[0], operations as f32);
        };
        run(10_000);
        let before = footprint().0;
        run(100_000);
        let after = footprint().0;
        println!("{plugin:?}: {before} -> {after} KiB over 100000 launches");
        // Other tests of this binary run meanwhile.
        assert!(after < before + 32 * 1024, "{before} -> {after} KiB");
    }
}

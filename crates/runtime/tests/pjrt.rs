//! The PJRT bindings on the CPU plugins installed here.

mod pjrt_support;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use pjrt_support::{
    Aligned, add, bytes, client, cpu_plugins, download, first, floats, square, upload,
};
use tpu_dist_runtime::pjrt::sys::BufferDonateWithControlDependency;
use tpu_dist_runtime::pjrt::{
    Buffer, Client, Code, CompileOptions, ElementType, Error, LaunchOptions, LoadedExecutable,
    OptionOverride, Plugin, Shape, Topology, Value,
};

fn compile(client: &Client, program: &str) -> LoadedExecutable {
    client
        .compile(program.as_bytes(), &CompileOptions::default())
        .unwrap()
}

fn run(program: &LoadedExecutable, arguments: &[&Buffer]) -> Vec<Vec<f32>> {
    let execution = program
        .execute(arguments, LaunchOptions::default())
        .unwrap();
    execution.complete.wait().unwrap();
    execution.outputs.iter().map(download).collect()
}

#[test]
fn says_why_a_file_is_no_plugin() {
    let missing = Plugin::load("/nonexistent/plugin.so").unwrap_err();
    assert!(
        matches!(&missing, Error::Load { path, .. } if path == Path::new("/nonexistent/plugin.so"))
    );
    assert!(missing.to_string().contains("No such file"), "{missing}");

    let text = std::env::temp_dir().join(format!("no-plugin-{}", std::process::id()));
    std::fs::write(&text, "hello").unwrap();
    let error = Plugin::load(&text).unwrap_err();
    std::fs::remove_file(&text).unwrap();
    assert!(matches!(error, Error::Load { .. }), "{error}");

    // A library, but no plugin.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let libc = maps
        .split_whitespace()
        .find(|word| word.contains("libc.so"))
        .unwrap();
    let error = Plugin::load(libc).unwrap_err();
    assert!(error.to_string().contains("GetPjrtApi"), "{error}");
}

#[test]
fn describes_plugin_client_and_devices() {
    for plugin in cpu_plugins() {
        assert_eq!(Plugin::load(plugin.path()).unwrap(), plugin);
        assert_eq!(plugin.version().0, 0);
        assert!(
            matches!(plugin.attributes()["stablehlo_current_version"], Value::IntList(ref v) if v.len() == 3)
        );
        let client = client(plugin, 3);
        assert_eq!(client.platform(), "cpu");
        assert_eq!(client.process_index().unwrap(), 0);
        assert_eq!(client.devices(), client.addressable_devices());
        let devices = client.devices();
        let descriptions: Vec<_> = devices
            .iter()
            .map(|device| device.description().unwrap())
            .collect();
        assert_eq!(
            descriptions.iter().map(|it| it.id).collect::<Vec<_>>(),
            [0, 1, 2]
        );
        assert!(
            descriptions
                .iter()
                .all(|it| it.process_index == 0 && it.kind == "cpu")
        );
        assert_eq!(devices[2].local_hardware_id().unwrap(), 2);
        let error = devices[0].memory_stats().unwrap_err();
        assert_eq!(error.code(), Code::Unimplemented, "{error}");

        let topology = Topology::of(&client).unwrap();
        assert_eq!(topology.platform().unwrap(), "cpu");
        assert_eq!(topology.devices().unwrap().len(), 3);
        assert!(!topology.serialize().unwrap().is_empty());
        topology.attributes().unwrap();
        // The description keeps its client.
        drop((client, devices));
        assert_eq!(topology.devices().unwrap().len(), 3);
    }
}

#[test]
fn computes_what_the_program_says() {
    for plugin in cpu_plugins() {
        let client = client(plugin, 1);
        let device = first(&client);
        let program = compile(
            &client,
            "module @several {
               func.func @main(%a: tensor<2x3xf32>, %b: tensor<3xi32>)
                   -> (tensor<3x2xf32>, tensor<3xi32>, tensor<bf16>) {
                 %0 = stablehlo.transpose %a, dims = [1, 0] : (tensor<2x3xf32>) -> tensor<3x2xf32>
                 %1 = stablehlo.multiply %b, %b : tensor<3xi32>
                 %2 = stablehlo.constant dense<1.5> : tensor<bf16>
                 return %0, %1, %2 : tensor<3x2xf32>, tensor<3xi32>, tensor<bf16>
               }
             }",
        );
        let shape = |element, dims: &[i64]| Shape {
            element: Some(element),
            dims: dims.into(),
        };
        assert_eq!(
            program.executable().outputs().unwrap(),
            [
                shape(ElementType::F32, &[3, 2]),
                shape(ElementType::S32, &[3]),
                shape(ElementType::BF16, &[])
            ]
        );
        assert_eq!(program.num_outputs(), 3);
        assert!(program.executable().name().unwrap().contains("several"));
        match program.executable().cost_analysis() {
            Ok(costs) => assert!(costs.contains_key("bytes accessed"), "{costs:?}"),
            Err(error) => assert_eq!(error.code(), Code::Unimplemented, "{error}"),
        }
        assert!(program.executable().memory().unwrap().outputs >= 24 + 12 + 2);

        let a = client
            .buffer_from_host(
                &bytes(&[1., 2., 3., 4., 5., 6.]),
                ElementType::F32,
                &[2, 3],
                &device,
            )
            .unwrap();
        let b: Vec<u8> = [-2i32, 3, 1000]
            .iter()
            .flat_map(|v| v.to_ne_bytes())
            .collect();
        let b = client
            .buffer_from_host(&b, ElementType::S32, &[3], &device)
            .unwrap();
        let execution = program
            .execute(&[&a, &b], LaunchOptions::default())
            .unwrap();
        let [transposed, squares, constant] = &execution.outputs[..] else {
            panic!()
        };
        assert_eq!(transposed.dims().unwrap(), [3, 2]);
        assert_eq!(download(transposed), [1., 4., 2., 5., 3., 6.]);
        let mut out = [0; 12];
        squares.to_host(&mut out).unwrap();
        assert_eq!(
            out,
            *[4i32, 9, 1_000_000].map(i32::to_ne_bytes).as_flattened()
        );
        let mut out = [0; 2];
        constant.to_host(&mut out).unwrap();
        assert_eq!(u16::from_ne_bytes(out), 0x3fc0);
        assert_eq!(constant.element_type().unwrap(), ElementType::BF16);
        assert_eq!(constant.dims().unwrap(), [0i64; 0]);
        assert_eq!(squares.device().unwrap(), device);
        assert!(squares.is_on_cpu().unwrap());

        // Nothing in, nothing out.
        let empty = client
            .buffer_from_host(&[], ElementType::F32, &[0, 4], &device)
            .unwrap();
        assert_eq!(download(&empty), [0f32; 0]);
        assert!(empty.view().unwrap().is_empty());
    }
}

#[test]
fn options_reach_the_compiler() {
    for plugin in cpu_plugins() {
        let client = client(plugin, 1);
        let with = |name: &str, value| {
            let overrides = BTreeMap::from([(name.to_string(), value)]);
            let options = CompileOptions {
                overrides,
                ..CompileOptions::default()
            };
            client.compile(add(4, false).as_bytes(), &options)
        };
        with("xla_cpu_enable_fast_math", OptionOverride::Bool(false)).unwrap();
        with("xla_backend_optimization_level", OptionOverride::Int(1)).unwrap();
        let error = with("xla_no_such_option", OptionOverride::Bool(true)).unwrap_err();
        assert!(error.to_string().contains("xla_no_such_option"), "{error}");
    }
}

#[test]
fn bad_input_is_an_error_that_names_it() {
    let plugins = cpu_plugins();
    for &plugin in &plugins {
        let client = client(plugin, 2);
        let device = first(&client);
        let other_client = pjrt_support::client(*plugins.last().unwrap(), 1);
        let program = compile(&client, &add(4, false));
        let four = upload(&device, &[1., 2., 3., 4.]);
        let five = upload(&device, &[0.; 5]);
        let foreign = upload(&first(&other_client), &[0.; 4]);
        let deleted = upload(&device, &[0.; 4]);
        deleted.delete().unwrap();
        assert!(deleted.is_deleted().unwrap());
        let execute = |arguments: &[&Buffer]| {
            program
                .execute(arguments, LaunchOptions::default())
                .map(drop)
        };
        let options = |assignment: Vec<Vec<i64>>| CompileOptions {
            device_assignment: assignment,
            ..CompileOptions::default()
        };
        let compiled = |code: &str, options: &CompileOptions| {
            client.compile(code.as_bytes(), options).map(drop)
        };
        let mut short = [0; 15];

        for (result, code, part) in [
            (
                compiled("module {", &options(vec![])),
                Code::Unknown,
                "expected operation name",
            ),
            (
                compiled(&add(4, false), &options(vec![vec![0, 1]])),
                Code::InvalidArgument,
                "1 x 1",
            ),
            (execute(&[&four]), Code::InvalidArgument, "1"),
            (execute(&[&four, &four, &four]), Code::InvalidArgument, "3"),
            (execute(&[&four, &five]), Code::InvalidArgument, ""),
            (
                execute(&[&four, &deleted]),
                Code::InvalidArgument,
                "deleted",
            ),
            (
                execute(&[&four, &foreign]),
                Code::InvalidArgument,
                "argument 1",
            ),
            (
                four.to_host(&mut short),
                Code::InvalidArgument,
                "expected 16 bytes",
            ),
            (
                client
                    .buffer_from_host(&[0; 7], ElementType::F32, &[2], &device)
                    .map(drop),
                Code::InvalidArgument,
                "expected 8 bytes for f32 [2], got 7",
            ),
            (
                client
                    .buffer_from_host(&[0; 8], ElementType::F32, &[-2], &device)
                    .map(drop),
                Code::InvalidArgument,
                "[-2]",
            ),
            (
                client
                    .buffer_from_host(&[0; 8], ElementType::F32, &[i64::MAX, i64::MAX], &device)
                    .map(drop),
                Code::InvalidArgument,
                "dims",
            ),
            (
                client
                    .buffer_from_host(&[0; 4], ElementType::F32, &[1], &first(&other_client))
                    .map(drop),
                Code::InvalidArgument,
                "device",
            ),
            (
                four.copy_to(&first(&other_client)).map(drop),
                Code::InvalidArgument,
                "device",
            ),
        ] {
            let error = result.unwrap_err();
            assert_eq!(error.code(), code, "{error}");
            assert!(error.to_string().contains(part), "{error} lacks {part}");
        }
        let read = deleted.to_host(&mut [0; 16]).unwrap_err();
        assert!(read.to_string().contains("deleted"), "{read}");
        // None of it did any harm.
        assert_eq!(run(&program, &[&four, &four]), [[2., 4., 6., 8.]]);
    }
}

#[test]
fn host_memory_is_used_in_place_where_it_is_aligned() {
    let values: Vec<f32> = (0..1024).map(|i| i as f32).collect();
    for plugin in cpu_plugins() {
        let client = client(plugin, 1);
        let device = first(&client);
        let program = compile(&client, &add(1024, false));
        for (offset, aliased) in [(0, true), (64, true), (4, false), (16, false), (32, false)] {
            let dropped = Arc::new(AtomicUsize::new(0));
            let memory = Aligned::<false>::new(&values, offset, &dropped);
            let address = memory.address();
            let imported = client
                .import(memory, ElementType::F32, &[1024], &device)
                .unwrap();
            assert_eq!(imported.aliased, aliased, "offset {offset}");
            assert_eq!(imported.buffer.address().unwrap() == address, aliased);
            let sums = run(&program, &[&imported.buffer, &imported.buffer]);
            assert!(
                sums[0]
                    .iter()
                    .zip(&values)
                    .all(|(sum, value)| *sum == 2. * value)
            );
            if aliased {
                assert_eq!(dropped.load(Ordering::SeqCst), 0, "memory in use was freed");
            }
            drop(imported);
            wait_for(
                || dropped.load(Ordering::SeqCst) == 1,
                "the memory to be freed",
            );
        }
        // A failed import frees the memory too.
        let dropped = Arc::new(AtomicUsize::new(0));
        let memory = Aligned::<false>::new(&values, 0, &dropped);
        client
            .import(memory, ElementType::F32, &[7], &device)
            .unwrap_err();
        assert_eq!(dropped.load(Ordering::SeqCst), 1);
    }
}

#[test]
fn results_are_read_in_place() {
    for plugin in cpu_plugins() {
        let client = client(plugin, 1);
        let device = first(&client);
        let program = compile(&client, &add(4, true));
        let a = upload(&device, &[1., 2., 3., 4.]);
        let b = upload(&device, &[10., 20., 30., 40.]);
        let view = a.view().unwrap();
        assert_eq!(view.as_ptr() as usize, a.address().unwrap());
        assert_eq!(floats(&view), [1., 2., 3., 4.]);
        // The program would write into the view, and therefore works on a copy.
        assert_eq!(run(&program, &[&a, &b]), [[11., 22., 33., 44.]]);
        assert_eq!(floats(&view), [1., 2., 3., 4.]);
        assert!(!a.is_deleted().unwrap());
        drop(view);
        assert_eq!(run(&program, &[&a, &b]), [[11., 22., 33., 44.]]);
        assert!(a.is_deleted().unwrap());
        assert!(a.view().is_err());
    }
}

#[test]
fn programs_take_over_the_memory_they_are_given() {
    let ones = [1f32; 4096];
    for plugin in cpu_plugins() {
        let client = client(plugin, 1);
        let device = first(&client);
        let program = compile(&client, &add(4096, true));
        let b = upload(&device, &ones);
        let dropped = Arc::new(AtomicUsize::new(0));
        let import = |mutable: bool| {
            let element = ElementType::F32;
            if mutable {
                let memory = Aligned::<true>::new(&ones, 0, &dropped);
                client
                    .import(memory, element, &[4096], &device)
                    .unwrap()
                    .buffer
            } else {
                let memory = Aligned::<false>::new(&ones, 0, &dropped);
                client
                    .import(memory, element, &[4096], &device)
                    .unwrap()
                    .buffer
            }
        };
        let keep_first = LaunchOptions {
            keep: &[0],
            ..LaunchOptions::default()
        };
        for (name, a, options, reused, deleted) in [
            (
                "own",
                upload(&device, &ones),
                LaunchOptions::default(),
                true,
                true,
            ),
            ("kept", upload(&device, &ones), keep_first, false, false),
            (
                "mutable import",
                import(true),
                LaunchOptions::default(),
                true,
                true,
            ),
            (
                "import",
                import(false),
                LaunchOptions::default(),
                false,
                true,
            ),
        ] {
            let before = a.address().unwrap();
            let execution = program.execute(&[&a, &b], options).unwrap();
            execution.complete.wait().unwrap();
            let output = &execution.outputs[0];
            assert_eq!(output.address().unwrap() == before, reused, "{name}");
            assert_eq!(a.is_deleted().unwrap(), deleted, "{name}");
            assert_eq!(download(output), [2f32; 4096], "{name}");
        }
        wait_for(
            || dropped.load(Ordering::SeqCst) == 2,
            "both imports to be freed",
        );
    }
}

#[test]
fn events_tell_the_end_and_the_failure() {
    for plugin in cpu_plugins() {
        let client = client(plugin, 1);
        let device = first(&client);
        // Takes many milliseconds, so that it is still running when asked.
        let n = 700;
        let program = compile(&client, &square(n));
        let matrix = client
            .buffer_from_host(
                &bytes(&vec![1.; n * n]),
                ElementType::F32,
                &[n as i64; 2],
                &device,
            )
            .unwrap();
        let execution = program
            .execute(&[&matrix], LaunchOptions::default())
            .unwrap();
        let at_once = execution.complete.wait_timeout(Duration::ZERO);
        assert!(at_once.is_none_or(|result| result.is_ok()));
        let (sender, receiver) = mpsc::channel();
        let again = sender.clone();
        execution
            .complete
            .on_ready(move |result| sender.send(result).unwrap())
            .unwrap();
        // A callback that panics is the caller's fault, and must not end the process.
        execution
            .complete
            .on_ready(|_| panic!("expected by the test"))
            .unwrap();
        // The results need not be kept, nor the program.
        let complete = execution.complete;
        drop((execution.outputs, program, matrix));
        assert_eq!(complete.wait_timeout(Duration::from_secs(60)), Some(Ok(())));
        assert_eq!(
            receiver.recv_timeout(Duration::from_secs(60)).unwrap(),
            Ok(())
        );
        assert!(complete.is_ready());
        assert_eq!(complete.wait(), Ok(()));
        // On a ready event the callback runs at once.
        complete
            .on_ready(move |result| again.send(result).unwrap())
            .unwrap();
        assert_eq!(receiver.try_recv().unwrap(), Ok(()));

        let buffer = upload(&device, &[1.]);
        buffer.delete().unwrap();
        let error = buffer.ready().unwrap().wait().unwrap_err();
        assert!(error.to_string().contains("deleted"), "{error}");
    }
}

#[test]
fn programs_survive_serialization() {
    for plugin in cpu_plugins() {
        let client = client(plugin, 1);
        let device = first(&client);
        let program = compile(&client, &add(4, true));
        let blob = program.executable().serialize().unwrap();
        drop(program);
        // SAFETY: the bytes come from this client's own program.
        let program = unsafe { client.deserialize(&blob) }.unwrap();
        assert_eq!(program.devices(), std::slice::from_ref(&device));
        assert_eq!(program.num_outputs(), 1);
        let (a, b) = (
            upload(&device, &[1., 2., 3., 4.]),
            upload(&device, &[4.; 4]),
        );
        assert_eq!(run(&program, &[&a, &b]), [[5., 6., 7., 8.]]);
        assert!(
            a.is_deleted().unwrap(),
            "the program no longer takes its argument over"
        );
        assert_eq!(
            compile(&client, &add(4, true))
                .executable()
                .fingerprint()
                .ok(),
            program.executable().fingerprint().ok()
        );
    }
}

#[test]
fn a_buffer_can_wait_for_work_outside() {
    let mut tried = false;
    for plugin in cpu_plugins() {
        let client = client(plugin, 1);
        let device = first(&client);
        let program = compile(&client, &add(4, false));
        let b = upload(&device, &[10.; 4]);
        let source = || upload(&device, &[1., 2., 3., 4.]);
        if !plugin.has::<BufferDonateWithControlDependency>() {
            let error = source().donate_until().unwrap_err();
            assert!(matches!(error, Error::Missing { .. }), "{error}");
            continue;
        }
        tried = true;

        // Written to by the host before the program may read it.
        let a = source();
        let address = a.address().unwrap();
        let (next, dependency) = a.donate_until().unwrap();
        assert!(a.is_deleted().unwrap());
        let execution = program
            .execute(&[&next, &b], LaunchOptions::default())
            .unwrap();
        assert!(!execution.complete.is_ready());
        thread::sleep(Duration::from_millis(20));
        assert!(!execution.complete.is_ready() && !next.ready().unwrap().is_ready());
        // SAFETY: the buffer's four floats, which nothing reads before `resolve`.
        unsafe { *(address as *mut [f32; 4]) = [5., 6., 7., 8.] };
        thread::spawn(move || dependency.resolve(Ok(())))
            .join()
            .unwrap();
        assert_eq!(download(&execution.outputs[0]), [15., 16., 17., 18.]);
        assert_eq!(next.address().unwrap(), address);

        // Failure reaches the buffer, and what is computed from it.
        for (resolve, code, part) in [
            (true, Code::Aborted, "peer 3 is gone"),
            (false, Code::Cancelled, "given up"),
        ] {
            let (next, dependency) = source().donate_until().unwrap();
            let execution = program
                .execute(&[&next, &b], LaunchOptions::default())
                .unwrap();
            if resolve {
                dependency.resolve(Err((Code::Aborted, "peer 3 is gone")));
            } else {
                drop(dependency);
            }
            // Plugins may replace the code where the failure is passed on.
            assert_eq!(next.ready().unwrap().wait().unwrap_err().code(), code);
            for error in [
                next.ready().unwrap().wait().unwrap_err(),
                execution.complete.wait().unwrap_err(),
                execution.outputs[0].to_host(&mut [0; 16]).unwrap_err(),
            ] {
                assert!(error.to_string().contains(part), "{error}");
            }
        }
        let dropped = Arc::new(AtomicUsize::new(0));
        let memory = Aligned::<false>::new(&[0.; 4], 0, &dropped);
        let import = client
            .import(memory, ElementType::F32, &[4], &device)
            .unwrap();
        let error = import.buffer.donate_until().unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        let memory = Aligned::<true>::new(&[0.; 4], 0, &dropped);
        let import = client
            .import(memory, ElementType::F32, &[4], &device)
            .unwrap();
        let (_, dependency) = import.buffer.donate_until().unwrap();
        dependency.resolve(Ok(()));
        let a = source();
        let view = a.view().unwrap();
        assert!(
            a.donate_until().is_err(),
            "memory was taken from under a view"
        );
        drop(view);
    }
    if !tried {
        println!("skipped: no plugin here lets buffers wait");
    }
}

#[test]
fn several_devices_run_one_program() {
    for plugin in cpu_plugins() {
        let client = client(plugin, 4);
        let devices = client.addressable_devices();
        let sum = |groups: &str, shape: &str| {
            format!(
                "module @sum {{
                   func.func @main(%a: tensor<8xf32>) -> tensor<8xf32> {{
                     %0 = \"stablehlo.all_reduce\"(%a) ({{
                       ^bb0(%x: tensor<f32>, %y: tensor<f32>):
                         %s = stablehlo.add %x, %y : tensor<f32>
                         stablehlo.return %s : tensor<f32>
                     }}) {{replica_groups = dense<{groups}> : tensor<{shape}xi64>}}
                       : (tensor<8xf32>) -> tensor<8xf32>
                     return %0 : tensor<8xf32>
                   }}
                 }}"
            )
        };
        for (program, assignment, expected) in [
            (
                sum("[[0, 1, 2, 3]]", "1x4"),
                vec![],
                vec![10., 10., 10., 10.],
            ),
            (sum("[[0, 3], [1, 2]]", "2x2"), vec![], vec![5., 5., 5., 5.]),
            (sum("[[0, 2], [1, 3]]", "2x2"), vec![], vec![4., 6., 4., 6.]),
            // Only two devices take part.
            (sum("[[0, 1]]", "1x2"), vec![vec![1], vec![3]], vec![6., 6.]),
        ] {
            let options = CompileOptions {
                num_replicas: expected.len() as u32,
                device_assignment: assignment,
                ..CompileOptions::default()
            };
            let program = client.compile(program.as_bytes(), &options).unwrap();
            assert_eq!(program.devices().len(), expected.len());
            let buffers: Vec<_> = program
                .devices()
                .iter()
                .map(|device| upload(device, &[device.description().unwrap().id as f32 + 1.; 8]))
                .collect();
            let lists: Vec<_> = buffers.iter().map(|buffer| vec![buffer]).collect();
            let lists: Vec<_> = lists.iter().map(Vec::as_slice).collect();
            let executions = program
                .execute_all(&lists, LaunchOptions::default())
                .unwrap();
            for (execution, expected) in executions.iter().zip(expected) {
                execution.complete.wait().unwrap();
                assert_eq!(download(&execution.outputs[0]), [expected; 8]);
            }
            let error = program
                .execute(&[&buffers[0]], LaunchOptions::default())
                .unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument);
            let error = program
                .execute_all(&lists[1..], LaunchOptions::default())
                .unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument);
        }
        // A program for one device runs on the one it is assigned.
        let options = CompileOptions::for_device(2);
        let program = client.compile(add(4, false).as_bytes(), &options).unwrap();
        assert_eq!(program.devices(), [devices[2].clone()]);
        let a = upload(&devices[0], &[1., 2., 3., 4.])
            .copy_to(&devices[2])
            .unwrap();
        assert_eq!(run(&program, &[&a, &a]), [[2., 4., 6., 8.]]);
    }
}

#[test]
fn compiles_for_a_described_topology() {
    for plugin in cpu_plugins() {
        let client = client(plugin, 1);
        let topology = Topology::of(&client).unwrap();
        match topology.compile(add(4, false).as_bytes(), &CompileOptions::default()) {
            Ok(executable) => {
                assert_eq!(executable.num_outputs().unwrap(), 1);
                let error = topology
                    .compile(b"nonsense", &CompileOptions::default())
                    .unwrap_err();
                assert!(
                    error.to_string().contains("'nonsense' is unknown"),
                    "{error}"
                );
            }
            Err(error) => assert_eq!(error.code(), Code::NotFound, "{error}"),
        }
        let error = Topology::create(plugin, "v5p:2x2x1", &[]).unwrap_err();
        assert_eq!(error.code(), Code::Unimplemented, "{error}");
    }
}

#[test]
fn a_callback_may_drop_the_last_of_a_client() {
    for plugin in cpu_plugins() {
        let client = client(plugin, 1);
        let device = first(&client);
        let n = 300;
        let program = compile(&client, &square(n));
        let matrix = client
            .buffer_from_host(
                &bytes(&vec![1.; n * n]),
                ElementType::F32,
                &[n as i64; 2],
                &device,
            )
            .unwrap();
        let execution = program
            .execute(&[&matrix], LaunchOptions::default())
            .unwrap();
        let done = Arc::new(AtomicBool::new(false));
        let signal = Arc::clone(&done);
        let everything = (client, device, program, matrix, execution.outputs);
        execution
            .complete
            .on_ready(move |result| {
                result.unwrap();
                drop(everything);
                signal.store(true, Ordering::SeqCst);
            })
            .unwrap();
        drop(execution.complete);
        wait_for(|| done.load(Ordering::SeqCst), "the callback");
    }
}

fn wait_for(condition: impl Fn() -> bool, what: &str) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

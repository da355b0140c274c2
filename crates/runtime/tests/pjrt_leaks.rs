//! Nothing stays behind in a process that uses PJRT for long. Alone in its binary, since
//! it measures the process.

mod pjrt_support;

use std::sync::Arc;
use std::thread;

use pjrt_support::{add, client, cpu_plugins, download, first, footprint, upload};
use tpu_dist_runtime::pjrt::{CompileOptions, LaunchOptions};

#[test]
fn use_from_many_threads_leaves_nothing_behind() {
    for plugin in cpu_plugins() {
        let cycle = |runs: usize| {
            let client = client(plugin, 2);
            let device = first(&client);
            let program = client.compile(add(256, true).as_bytes(), &CompileOptions::default());
            let program = Arc::new(program.unwrap());
            thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        let b = upload(&device, &[1.; 256]);
                        let mut a = upload(&device, &[0.; 256]);
                        for _ in 0..runs {
                            let mut execution = program
                                .execute(&[&a, &b], LaunchOptions::default())
                                .unwrap();
                            a = execution.outputs.remove(0);
                        }
                        assert_eq!(download(&a), [runs as f32; 256]);
                    });
                }
            });
        };
        for _ in 0..5 {
            cycle(1700);
        }
        let before = footprint();
        for _ in 0..20 {
            cycle(1700);
        }
        let after = footprint();
        println!(
            "{plugin:?}: KiB and threads {before:?} -> {after:?} over 20 clients, 102000 runs"
        );
        assert!(
            after.0 < before.0 + 4 * 1024,
            "memory grew: {before:?} -> {after:?}"
        );
        assert!(
            after.1 <= before.1,
            "threads were left behind: {before:?} -> {after:?}"
        );
    }
}

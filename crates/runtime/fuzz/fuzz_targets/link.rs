//! A link whose peer sends arbitrary bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tpu_dist_runtime::fuzz::link(bytes));

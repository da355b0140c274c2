//! Every parser of bytes that a peer or the store holds.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tpu_dist_runtime::fuzz::wire(bytes));

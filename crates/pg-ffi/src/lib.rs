//! tpu-dist-pg-ffi

//! tpu-dist-runtime

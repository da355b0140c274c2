//! tpu-dist-mesh

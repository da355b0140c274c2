//! The device "tpu" of PyTorch: what C++ (`cpp/device/`) and Python (`torch.tpu`) call.

// The bridge macro makes its items public.
#[allow(unreachable_pub)]
pub(crate) mod bridge;
mod python;

pub(crate) use python::register;

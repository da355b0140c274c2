//! PJRT, the interface of XLA's devices: libtpu, and XLA's CPU plugins.
//!
//! [`Plugin`] loads a plugin, [`Client`] opens its devices, [`Buffer`] is memory of a
//! device, [`LoadedExecutable`] a program ready to run there. [`Topology`] describes
//! devices that need not exist, and compiles for them. All of it can be used from any
//! thread. Handles keep alive what they depend on, a buffer its client for example, and
//! free it when the last is dropped.
//!
//! What PJRT does asynchronously it reports through an [`Event`].

mod buffer;
mod client;
mod element;
mod error;
mod event;
mod executable;
mod options;
mod plugin;
pub mod sys;
mod topology;
mod value;

pub use buffer::{Buffer, Dependency, HostMemory, HostView, Imported};
pub use client::{Client, Device, DeviceDescription, MemoryStats};
pub use element::ElementType;
pub use error::{Code, Error};
pub use event::Event;
pub use executable::{
    Executable, Execution, LaunchOptions, LoadedExecutable, Outputs, ProgramMemory, Shape,
};
pub use options::{CompileOptions, OptionOverride};
pub use plugin::Plugin;
pub use topology::Topology;
pub use value::{Attributes, Value};

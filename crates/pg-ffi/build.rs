//! Compiles the C++ side against the torch of the Python that builds us.

use std::path::{Path, PathBuf};
use std::process::Command;

/// What the build needs to know about torch.
struct Torch {
    /// The directory of the installed package.
    package: PathBuf,
    /// Where `Python.h` is.
    python_include: PathBuf,
    cxx11_abi: String,
}

const QUERY: &str = "\
import sysconfig, torch, os
print(os.path.dirname(torch.__file__))
print(sysconfig.get_paths()['include'])
print(int(torch._C._GLIBCXX_USE_CXX11_ABI))
";

/// The interpreter maturin names, else the repository's environment, else the PATH's.
fn python() -> PathBuf {
    println!("cargo:rerun-if-env-changed=PYO3_PYTHON");
    if let Some(python) = std::env::var_os("PYO3_PYTHON") {
        return python.into();
    }
    let local = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/bin/python");
    if local.exists() {
        local
    } else {
        PathBuf::from("python3")
    }
}

fn torch() -> Torch {
    let python = python();
    let output = Command::new(&python)
        .args(["-c", QUERY])
        // The backend that is about to be built may be installed in an older state.
        .env("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        .output()
        .unwrap_or_else(|error| panic!("cannot run {}: {error}", python.display()));
    assert!(
        output.status.success(),
        "{} has no usable torch: install torch 2.15 into it (`make build` does), or name \
         another interpreter in PYO3_PYTHON\n{}",
        python.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).expect("paths are UTF-8");
    let mut lines = text.lines();
    let mut next = || {
        lines
            .next()
            .expect("the query prints three lines")
            .to_owned()
    };
    Torch {
        package: next().into(),
        python_include: next().into(),
        cxx11_abi: next(),
    }
}

fn main() {
    let torch = torch();
    println!("cargo:rerun-if-changed=cpp");
    println!(
        "cargo:rerun-if-changed={}",
        torch.package.join("version.py").display()
    );

    cxx_build::CFG.include_prefix = "tpu_dist";
    cxx_build::bridges(["src/bridge.rs", "src/device/bridge.rs"])
        .files([
            "cpp/device/allocator.cpp",
            "cpp/device/autocast.cpp",
            "cpp/device/call.cpp",
            "cpp/device/copy.cpp",
            "cpp/device/generator.cpp",
            "cpp/device/guard.cpp",
            "cpp/device/kernel.cpp",
            "cpp/device/native.cpp",
            "cpp/device/python.cpp",
            "cpp/arena.cpp",
            "cpp/executor.cpp",
            "cpp/work.cpp",
            "cpp/backend.cpp",
            "cpp/python.cpp",
        ])
        .include("cpp")
        .flag(format!(
            "-isystem{}",
            torch.package.join("include").display()
        ))
        .flag(format!(
            "-isystem{}",
            torch
                .package
                .join("include/torch/csrc/api/include")
                .display()
        ))
        .flag(format!("-isystem{}", torch.python_include.display()))
        .define("_GLIBCXX_USE_CXX11_ABI", torch.cxx11_abi.as_str())
        .flag("-fvisibility=hidden")
        .flag_if_supported("-Wno-missing-field-initializers")
        .std("c++20")
        .opt_level(2)
        .debug(false)
        .compile("tpu_dist_cpp");

    println!(
        "cargo:rustc-link-search=native={}",
        torch.package.join("lib").display()
    );
    for library in ["c10", "torch_cpu", "torch_python"] {
        println!("cargo:rustc-link-lib=dylib={library}");
    }
}

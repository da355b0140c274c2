//! Every environment variable that the runtime reads, in one typed table.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

/// Which transports may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportChoice {
    /// Shared memory between processes of one host, TCP between hosts.
    Auto,
    /// TCP everywhere.
    Tcp,
}

/// How the device's tensors take part in collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceCollectives {
    /// In place where the host reaches their memory; else as programs.
    Auto,
    /// As programs where there is one, else by way of copies on the host.
    Programs,
    /// By way of copies on the host.
    Copies,
}

/// What to do with an operator that the device has no program for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// Run it on the CPU, and count it.
    Cpu,
    /// Fail.
    Error,
}

/// The configuration of a process, read from its environment once.
#[derive(Clone, Debug)]
pub struct Config {
    /// `TPU_DIST_TRANSPORT`: `auto` (default) or `tcp`.
    pub transport: TransportChoice,
    /// `TPU_DIST_SOCKET_IFNAME`, else `GLOO_SOCKET_IFNAME`: names, `^` before a list
    /// excludes, entries with a `/` are CIDR networks. `None`: choose by route.
    pub interfaces: Option<String>,
    /// `MASTER_ADDR`: the host whose route chooses the interface.
    pub master: Option<String>,
    /// `TPU_DIST_TCP_STREAMS`: data connections to each peer on another host, 1 to 16;
    /// `None`: by the speed of the interface.
    pub streams: Option<u32>,
    /// `TPU_DIST_TCP_CONGESTION`: the congestion control of data connections, as Linux names it;
    /// default: the system's, or `cubic` where that is `bbr`, whose pacing costs a third of the
    /// bandwidth inside a data centre.
    pub congestion: Option<String>,
    /// `TPU_DIST_HEARTBEAT_SECONDS`: silence on a network connection after which a peer
    /// counts as lost; default 15.
    pub heartbeat: Duration,
    /// `TPU_DIST_SPIN_MICROSECONDS`: how long a waiting thread spins before it sleeps;
    /// default 50. Four times as long where peers are on other hosts, or ranks share cores.
    pub spin: Duration,
    /// `TPU_DIST_CMA`: 0 keeps processes from reading each other's memory by cross-memory attach,
    /// and has them go through shared memory where they otherwise would.
    pub cross_memory: bool,
    /// `TPU_DIST_ALGO`: the algorithm of every collective between hosts; default: by cost.
    pub algorithm: Option<String>,
    /// `TPU_DIST_PJRT_PLUGIN`: the file of the device's plugin; default: libtpu where there is a
    /// TPU, else an installed plugin for the CPU.
    pub plugin: Option<PathBuf>,
    /// `TPU_DIST_VIRTUAL_SLICE`: the slice that the ranks stand for, as `v5p:2x2x4`.
    pub virtual_slice: Option<String>,
    /// `TPU_DIST_DEVICE_COLLECTIVES`: `auto` (default), `programs` or `copies`.
    pub device_collectives: DeviceCollectives,
    /// `TPU_DIST_FALLBACK`: `cpu` (default) or `error`.
    pub fallback: Fallback,
    /// `TPU_LAUNCH_BLOCKING`: 1 makes the device wait for each program, so that a failure
    /// appears where it is caused.
    pub blocking: bool,
    /// `TPU_DIST_CACHE_DIR`: where compiled programs are kept, `off` for nowhere; default:
    /// `tpu_dist` in `XDG_CACHE_HOME` or `~/.cache`.
    pub cache_directory: Option<PathBuf>,
    /// `TPU_DIST_CACHE_BYTES`: what they may take; default 4 GiB.
    pub cache_bytes: u64,
    /// `XLA_FLAGS` and `LIBTPU_INIT_ARGS`, which the plugin reads.
    pub plugin_flags: String,
}

const KNOWN: &[&str] = &[
    "TPU_DIST_TRANSPORT",
    "TPU_DIST_SOCKET_IFNAME",
    "TPU_DIST_TCP_STREAMS",
    "TPU_DIST_TCP_CONGESTION",
    "TPU_DIST_HEARTBEAT_SECONDS",
    "TPU_DIST_SPIN_MICROSECONDS",
    "TPU_DIST_CMA",
    "TPU_DIST_ALGO",
    "TPU_DIST_PJRT_PLUGIN",
    "TPU_DIST_DEVICE_COLLECTIVES",
    "TPU_DIST_FALLBACK",
    "TPU_DIST_CACHE_DIR",
    "TPU_DIST_CACHE_BYTES",
    // Read by the Python package.
    "TPU_DIST_PREFER",
    "TPU_DIST_LOG",
    "TPU_DIST_VIRTUAL_SLICE",
];

static CONFIG: OnceLock<Config> = OnceLock::new();

impl Config {
    /// The configuration of this process, settled by the first call.
    pub fn get() -> &'static Config {
        CONFIG.get_or_init(|| {
            let unknown = std::env::vars()
                .map(|(name, _)| name)
                .filter(|name| name.starts_with("TPU_DIST_") && !name.starts_with("TPU_DIST_TEST_"))
                .filter(|name| !KNOWN.contains(&name.as_str()));
            for name in unknown {
                tracing::warn!("environment variable {name} is not one of tpu_dist's: ignored");
            }
            Config::read(variable)
        })
    }

    /// What [`Config::get`] would say, without settling it: for what is asked while a program is
    /// being imported, which may set variables yet.
    pub fn peek() -> Cow<'static, Config> {
        match CONFIG.get() {
            Some(config) => Cow::Borrowed(config),
            None => Cow::Owned(Config::read(variable)),
        }
    }

    fn read(env: impl Fn(&str) -> Option<String>) -> Config {
        fn number(name: &str, value: Option<String>, default: u64, low: u64, high: u64) -> u64 {
            let Some(text) = value else { return default };
            match text.parse() {
                Ok(number) if (low..=high).contains(&number) => number,
                _ => {
                    tracing::warn!(
                        "{name}={text}: expected a whole number from {low} to {high}; ignored"
                    );
                    default
                }
            }
        }
        let read = |name, default, low, high| number(name, env(name), default, low, high);
        Config {
            transport: match env("TPU_DIST_TRANSPORT").as_deref() {
                None | Some("auto") => TransportChoice::Auto,
                Some("tcp") => TransportChoice::Tcp,
                Some(other) => {
                    tracing::warn!("TPU_DIST_TRANSPORT={other}: expected auto or tcp; using auto");
                    TransportChoice::Auto
                }
            },
            interfaces: env("TPU_DIST_SOCKET_IFNAME").or_else(|| env("GLOO_SOCKET_IFNAME")),
            master: env("MASTER_ADDR"),
            streams: match read("TPU_DIST_TCP_STREAMS", 0, 1, 16) {
                0 => None,
                count => Some(count as u32),
            },
            congestion: env("TPU_DIST_TCP_CONGESTION"),
            heartbeat: Duration::from_secs(read("TPU_DIST_HEARTBEAT_SECONDS", 15, 1, 3600)),
            spin: Duration::from_micros(read("TPU_DIST_SPIN_MICROSECONDS", 50, 0, 1_000_000)),
            cross_memory: env("TPU_DIST_CMA").is_none_or(|value| value != "0"),
            algorithm: env("TPU_DIST_ALGO"),
            plugin: env("TPU_DIST_PJRT_PLUGIN").map(PathBuf::from),
            virtual_slice: env("TPU_DIST_VIRTUAL_SLICE"),
            device_collectives: match env("TPU_DIST_DEVICE_COLLECTIVES").as_deref() {
                None | Some("auto") => DeviceCollectives::Auto,
                Some("programs") => DeviceCollectives::Programs,
                Some("copies") => DeviceCollectives::Copies,
                Some(other) => {
                    tracing::warn!(
                        "TPU_DIST_DEVICE_COLLECTIVES={other}: expected auto, programs or copies; \
                         using auto"
                    );
                    DeviceCollectives::Auto
                }
            },
            fallback: match env("TPU_DIST_FALLBACK").as_deref() {
                None | Some("cpu") => Fallback::Cpu,
                Some("error") => Fallback::Error,
                Some(other) => {
                    tracing::warn!("TPU_DIST_FALLBACK={other}: expected cpu or error; using cpu");
                    Fallback::Cpu
                }
            },
            blocking: env("TPU_LAUNCH_BLOCKING").is_some_and(|value| value != "0"),
            cache_directory: match env("TPU_DIST_CACHE_DIR").as_deref() {
                Some("off") => None,
                Some(directory) => Some(PathBuf::from(directory)),
                None => env("XDG_CACHE_HOME")
                    .map(PathBuf::from)
                    .or_else(|| Some(PathBuf::from(env("HOME")?).join(".cache")))
                    .map(|cache| cache.join("tpu_dist")),
            },
            cache_bytes: read("TPU_DIST_CACHE_BYTES", 4 << 30, 0, u64::MAX),
            plugin_flags: ["XLA_FLAGS", "LIBTPU_INIT_ARGS"]
                .map(|name| format!("{name}={}", env(name).unwrap_or_default()))
                .join("\n"),
        }
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_parsed_and_bad_ones_fall_back() {
        let config = Config::read(|name| match name {
            "TPU_DIST_TRANSPORT" => Some("tcp".into()),
            "TPU_DIST_TCP_STREAMS" => Some("99".into()),
            "GLOO_SOCKET_IFNAME" => Some("eth1".into()),
            "TPU_DIST_FALLBACK" => Some("never".into()),
            "TPU_LAUNCH_BLOCKING" => Some("1".into()),
            "HOME" => Some("/home/me".into()),
            _ => None,
        });
        assert_eq!(config.transport, TransportChoice::Tcp);
        assert_eq!(config.streams, None);
        assert_eq!(config.interfaces.as_deref(), Some("eth1"));
        assert_eq!(config.fallback, Fallback::Cpu);
        assert!(config.blocking);
        let cache = config.cache_directory.as_deref();
        assert_eq!(cache, Some("/home/me/.cache/tpu_dist".as_ref()));
    }
}

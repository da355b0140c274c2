//! Which addresses of this host peers should use.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

use crate::Error;
use crate::config::Config;

/// One address of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) interface: String,
    pub(crate) address: IpAddr,
}

/// The addresses to publish, best first, and why the first was chosen.
pub(crate) fn choose(config: &Config) -> Result<(Vec<Candidate>, String), Error> {
    let all = candidates()?;
    if let Some(filter) = &config.interfaces {
        let chosen = select(filter, &all)?;
        return Ok((chosen, format!("SOCKET_IFNAME={filter}")));
    }
    let route = config.master.as_deref().and_then(route_to);
    Ok(order(all, route))
}

/// Data connections that fill the link of an interface.
pub(crate) fn streams(interface: &str) -> u32 {
    let speed = std::fs::read_to_string(format!("/sys/class/net/{interface}/speed"));
    streams_for(speed.ok().and_then(|megabits| megabits.trim().parse().ok()))
}

/// One connection moves about 4 GB/s (32 Gbit/s) here, less with a real network's round
/// trips; the speed of virtual interfaces is not known, or a made-up 10 Gbit/s.
fn streams_for(megabits: Option<i64>) -> u32 {
    match megabits {
        Some(100_000..) => 8,
        Some(25_000..) => 4,
        _ => 1,
    }
}

/// Puts the address that routes to the master first, then the other addresses that
/// reach beyond this host, then loopback.
fn order(mut all: Vec<Candidate>, route: Option<IpAddr>) -> (Vec<Candidate>, String) {
    let rank = |candidate: &Candidate| {
        let address = candidate.address;
        let beyond = !address.is_loopback();
        (
            !(beyond && Some(address) == route),
            !beyond,
            is_link_local(address),
            address.is_ipv6(),
        )
    };
    all.sort_by_key(rank);
    let why = match all.first() {
        Some(first) if Some(first.address) == route => "it routes to MASTER_ADDR".to_owned(),
        _ => "the first interface that is up".to_owned(),
    };
    (all, why)
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

fn candidates() -> Result<Vec<Candidate>, Error> {
    let interfaces =
        getifaddrs().map_err(|error| Error::Network(format!("listing interfaces: {error}")))?;
    let up = interfaces.filter(|interface| {
        interface
            .flags
            .contains(InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING)
    });
    let found = up.filter_map(|interface| {
        let address = interface.address?;
        let address = match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
            (Some(v4), _) => IpAddr::V4(v4.ip()),
            // A link-local address needs a scope that means nothing to a peer.
            (_, Some(v6)) if !v6.ip().is_unicast_link_local() => IpAddr::V6(v6.ip()),
            _ => return None,
        };
        Some(Candidate {
            interface: interface.interface_name,
            address,
        })
    });
    Ok(found.collect())
}

/// The source address that the system would use towards `host`.
fn route_to(host: &str) -> Option<IpAddr> {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let targets = (host, 9).to_socket_addrs().ok()?;
    targets
        .filter_map(|target| {
            let any: SocketAddr = if target.is_ipv4() {
                ([0, 0, 0, 0], 0).into()
            } else {
                ([0u16; 8], 0).into()
            };
            let socket = UdpSocket::bind(any).ok()?;
            // Connecting a datagram socket sends nothing; it only looks up the route.
            socket.connect(target).ok()?;
            Some(socket.local_addr().ok()?.ip())
        })
        .next()
}

/// Applies a filter: names, a leading `^` to exclude, CIDR networks.
fn select(filter: &str, all: &[Candidate]) -> Result<Vec<Candidate>, Error> {
    let (exclude, list) = match filter.strip_prefix('^') {
        Some(list) => (true, list),
        None => (false, filter),
    };
    let entries: Vec<&str> = list
        .split(',')
        .map(str::trim)
        .filter(|entry| !entry.is_empty())
        .collect();
    let mut patterns = Vec::new();
    for entry in entries {
        patterns.push(match entry.split_once('/') {
            Some((network, bits)) => {
                let parsed = network.parse::<IpAddr>().ok().zip(bits.parse::<u32>().ok());
                let (network, bits) = parsed
                    .filter(|(network, bits)| *bits <= if network.is_ipv4() { 32 } else { 128 })
                    .ok_or_else(|| {
                        Error::Network(format!(
                            "SOCKET_IFNAME={filter}: {entry} is no network in CIDR form, such as 10.0.0.0/8"
                        ))
                    })?;
                Pattern::Network(network, bits)
            }
            None => Pattern::Name(entry),
        });
    }
    let mut chosen = Vec::new();
    if exclude {
        let kept =
            |candidate: &&Candidate| !patterns.iter().any(|pattern| pattern.matches(candidate));
        chosen.extend(all.iter().filter(kept).cloned());
        chosen = order(chosen, None).0;
    } else {
        for pattern in &patterns {
            chosen.extend(
                all.iter()
                    .filter(|candidate| pattern.matches(candidate))
                    .cloned(),
            );
        }
    }
    if chosen.is_empty() {
        let have: Vec<String> = all
            .iter()
            .map(|candidate| format!("{} ({})", candidate.interface, candidate.address))
            .collect();
        return Err(Error::Network(format!(
            "SOCKET_IFNAME={filter} matches no interface that is up; there are {}",
            have.join(", ")
        )));
    }
    Ok(chosen)
}

enum Pattern<'a> {
    Name(&'a str),
    Network(IpAddr, u32),
}

impl Pattern<'_> {
    fn matches(&self, candidate: &Candidate) -> bool {
        match *self {
            Pattern::Name(name) => candidate.interface == name,
            Pattern::Network(network, bits) => match (network, candidate.address) {
                (IpAddr::V4(network), IpAddr::V4(address)) => {
                    let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
                    (network.to_bits() ^ address.to_bits()) & mask == 0
                }
                (IpAddr::V6(network), IpAddr::V6(address)) => {
                    let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
                    (network.to_bits() ^ address.to_bits()) & mask == 0
                }
                _ => false,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Vec<Candidate> {
        [
            ("lo", "127.0.0.1"),
            ("eth0", "10.1.2.3"),
            ("eth1", "192.168.7.8"),
            ("eth1", "fd00::8"),
        ]
        .map(|(interface, address)| Candidate {
            interface: interface.into(),
            address: address.parse().unwrap(),
        })
        .into()
    }

    #[test]
    fn fast_links_take_several_connections() {
        let cases = [
            (None, 1),
            (Some(-1), 1),
            (Some(10_000), 1),
            (Some(25_000), 4),
            (Some(200_000), 8),
        ];
        for (speed, expected) in cases {
            assert_eq!(streams_for(speed), expected, "{speed:?}");
        }
    }

    #[test]
    fn filters() {
        let cases: &[(&str, &[&str])] = &[
            ("eth1", &["192.168.7.8", "fd00::8"]),
            ("eth1,eth0", &["192.168.7.8", "fd00::8", "10.1.2.3"]),
            ("^lo,eth1", &["10.1.2.3"]),
            ("10.0.0.0/8", &["10.1.2.3"]),
            ("fd00::/16", &["fd00::8"]),
            ("0.0.0.0/0", &["127.0.0.1", "10.1.2.3", "192.168.7.8"]),
        ];
        for (filter, expected) in cases {
            let chosen = select(filter, &host()).unwrap();
            let chosen: Vec<String> = chosen
                .iter()
                .map(|candidate| candidate.address.to_string())
                .collect();
            assert_eq!(&chosen, expected, "{filter}");
        }
        let error = select("nope", &host()).unwrap_err().to_string();
        assert!(
            error.contains("nope") && error.contains("eth0 (10.1.2.3)"),
            "{error}"
        );
        assert!(select("10.0.0.0/99", &host()).is_err());
    }

    #[test]
    fn the_route_to_the_master_wins_and_loopback_is_last() {
        let (ordered, why) = order(host(), Some("192.168.7.8".parse().unwrap()));
        assert_eq!(ordered[0].address.to_string(), "192.168.7.8");
        assert!(why.contains("MASTER_ADDR"));
        assert_eq!(ordered.last().unwrap().interface, "lo");
        // A master that resolves to loopback says nothing about other hosts.
        let (ordered, _) = order(host(), Some("127.0.0.1".parse().unwrap()));
        assert_eq!(ordered[0].interface, "eth0");
    }
}

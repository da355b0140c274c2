//! Rings of every legal slice.

use std::collections::HashSet;

use tpu_dist_mesh::{ChipId, Coord, Generation, LinkGraph, Slice, ring};

fn legal() -> impl Iterator<Item = Slice> {
    Generation::ALL.into_iter().flat_map(|generation| {
        generation.legal_slices().into_iter().map(move |legal| {
            Slice::new(generation, legal.shape)
                .unwrap()
                .with_twist(legal.twisted)
                .unwrap()
        })
    })
}

/// Checks that a ring visits every live chip once over real links; returns its links, undirected.
fn check(links: &LinkGraph, ring: &[ChipId]) -> HashSet<(ChipId, ChipId)> {
    let slice = links.slice();
    let alive = (0..slice.chips()).filter(|&chip| links.is_alive(ChipId(chip)));
    assert_eq!(ring.len(), alive.count(), "{slice}");
    assert!(ring.iter().all(|&chip| links.is_alive(chip)), "{slice}");
    assert_eq!(
        ring.iter().collect::<HashSet<_>>().len(),
        ring.len(),
        "{slice}"
    );
    let mut used = HashSet::new();
    for at in 0..ring.len() {
        let (from, to) = (ring[at], ring[(at + 1) % ring.len()]);
        if from != to {
            let joined = links.live_links(from).any(|(_, link)| link.to == to);
            assert!(joined, "{slice}: {from:?} to {to:?}");
            used.insert((from.min(to), from.max(to)));
        }
    }
    used
}

#[test]
fn every_legal_slice_has_a_ring() {
    for slice in legal() {
        check(&LinkGraph::new(&slice), &ring::ring(&slice));
    }
}

#[test]
fn coloured_rings_use_every_link_once() {
    // Shapes repeat among generations; large ones of the same generation are alike.
    let mut seen = HashSet::new();
    for slice in legal() {
        let key = (slice.shape(), slice.wrap(), slice.is_twisted());
        let large = slice.chips() > 1024 && !slice.is_twisted() && slice.chips() < 9000;
        if large || !seen.insert(key) {
            continue;
        }
        let links = LinkGraph::new(&slice);
        let rings = ring::rings(&links).unwrap();
        let wrapped = slice.wrap().iter().filter(|&&wrap| wrap).count();
        let expected = if wrapped == slice.shape().dimensions() {
            wrapped
        } else {
            1
        };
        assert_eq!(rings.len(), expected, "{slice}");
        let mut used = HashSet::new();
        for ring in &rings {
            for link in check(&links, ring) {
                assert!(used.insert(link), "{slice}: two rings share {link:?}");
            }
        }
        if expected > 1 {
            assert_eq!(2 * used.len(), links.len(), "{slice}: every link is used");
        }
    }
    assert!(seen.len() > 100, "{}", seen.len());
}

#[test]
fn rings_with_faults() {
    let slice: Slice = "v6e:16x16".parse().unwrap();
    let (a, b) = (Coord([0, 0, 0]), Coord([1, 0, 0]));
    let mut links = LinkGraph::new(&slice);
    links.kill_link(a, b).unwrap();
    let rings = ring::rings(&links).unwrap();
    assert_eq!(rings.len(), 1, "one colour is lost");
    check(&links, &rings[0]);
    links.kill_link(a, Coord([15, 0, 0])).unwrap();
    links.kill_link(a, Coord([0, 1, 0])).unwrap();
    let error = ring::rings(&links).unwrap_err().to_string();
    assert!(
        error.starts_with("no ring over v6e:16x16: each crosses a dead link; others"),
        "{error}"
    );
    links.kill_chip(b).unwrap();
    let error = ring::rings(&links).unwrap_err().to_string();
    let words = "chip (1,0,0) is dead; neighbours alternate between 128 even and 127 odd places";
    assert!(error.contains(words), "{error}");
}

#[test]
fn a_ring_goes_around_dead_hosts() {
    for (name, corners) in [
        ("v6e:16x16", &[[0, 0, 0]][..]),
        ("v6e:16x16", &[[4, 6, 0], [14, 14, 0], [6, 6, 0]]),
        ("v5e:4x4", &[[2, 0, 0]]),
        ("v5e:4x4", &[[0, 0, 0], [2, 2, 0]]),
        ("v5p:4x4x4", &[[0, 0, 0]]),
        ("v5p:4x4x8", &[[2, 2, 3], [0, 0, 0], [0, 0, 1]]),
        ("v5p:2x2x4", &[[0, 0, 3]]),
    ] {
        let slice: Slice = name.parse().unwrap();
        let mut links = LinkGraph::new(&slice);
        for &[x, y, z] in corners {
            for (dx, dy) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                links.kill_chip(Coord([x + dx, y + dy, z])).unwrap();
            }
        }
        match ring::rings(&links) {
            Ok(rings) => {
                assert_eq!(rings.len(), 1, "{name}");
                check(&links, &rings[0]);
            }
            // Two squares that touch at a corner only.
            Err(error) => {
                assert_eq!((name, corners.len()), ("v5e:4x4", 2), "{error}");
                assert!(error.to_string().contains("8 chips are dead"), "{error}");
            }
        }
    }
    // Both rings of a mesh's only decomposition are cut, and another is found.
    let slice: Slice = "v5e:4x4".parse().unwrap();
    let mut links = LinkGraph::new(&slice);
    links.kill_link(Coord([1, 1, 0]), Coord([2, 1, 0])).unwrap();
    links.kill_link(Coord([1, 0, 0]), Coord([2, 0, 0])).unwrap();
    check(&links, &ring::rings(&links).unwrap()[0]);
}

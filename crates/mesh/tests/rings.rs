//! Rings of every legal slice.

use std::collections::HashSet;

use tpu_dist_mesh::{ChipId, Coord, Error, Generation, LinkGraph, Slice, ring};

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

/// Checks that a ring visits every chip once over real links; returns its links, undirected.
fn check(links: &LinkGraph, ring: &[ChipId]) -> HashSet<(ChipId, ChipId)> {
    let slice = links.slice();
    assert_eq!(ring.len(), slice.chips() as usize, "{slice}");
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
    let error = ring::rings(&links).unwrap_err();
    assert_eq!(
        error.to_string(),
        "no ring over v6e:16x16: each crosses a dead link"
    );
    links.kill_chip(b).unwrap();
    assert!(
        matches!(ring::rings(&links), Err(Error::NoRing { reason, .. }) if reason.contains("(1,0,0) is dead"))
    );
}

//! Pictures hold what they should.

use tpu_dist_mesh::{
    LinkGraph, MultiSlice, Slice, assign,
    draw::{self, Drawing},
};

fn mesh(name: &str, shape: &[u32], names: &[&str]) -> (MultiSlice, assign::Placement, Vec<String>) {
    let job: MultiSlice = name.parse().unwrap();
    let placement = assign::place(&job, shape, None, &assign::default_traffic(names)).unwrap();
    (
        job,
        placement,
        names.iter().map(|name| (*name).to_owned()).collect(),
    )
}

#[test]
fn text_of_a_small_mesh() {
    let (job, placement, names) = mesh("v5e:4x4", &[4, 4], &["dp", "tp"]);
    let text = Drawing::mesh(&job, &placement, &names).text();
    let grid = "\
 x right, y down
  0,0  0,1  1,0  1,1
  0,3  0,2  1,3  1,2
  3,0  3,1  2,0  2,1
  3,3  3,2  2,3  2,2
";
    assert!(text.contains(grid), "{text}");
    assert!(text.contains("tp=4 on x 2 line · y 2 line; ring of neighbours; all_reduce 256 MiB"));
    assert!(
        text.contains("tp from rank 0: (0,0,0) (1,0,0) (1,1,0) (0,1,0) and back"),
        "{text}"
    );
    let plain = Drawing::slice(&job).text();
    assert!(plain.starts_with("v5e:4x4: 16 chips, 16 devices, 4 hosts; no wrap; ICI 50 GB/s"));
    assert!(
        plain.contains("  0   1   4   5\n   2   3   6   7\n"),
        "{plain}"
    );
}

#[test]
fn svg_shows_every_chip_and_link() {
    for (name, shape, names) in [
        ("v5e:4x4", &[4, 4][..], &["dp", "tp"][..]),
        ("v6e:16x16", &[4, 8, 8], &["pp", "fsdp", "tp"]),
        ("v5p:4x8x8_twisted", &[4, 64], &["dp", "tp"]),
        ("2*v7x:2x2x2", &[2, 8, 2], &["<a>", "b", "c"]),
    ] {
        let (job, placement, names) = mesh(name, shape, names);
        let svg = Drawing::mesh(&job, &placement, &names).svg();
        let slice: &Slice = job.slice();
        let count = |what: &str| svg.matches(what).count();
        assert_eq!(
            count("fill=\"white\" stroke=\"#3c4043\"") as u32,
            slice.chips(),
            "{name}"
        );
        assert_eq!(count("fill=\"#f1f3f4\"") as u32, slice.hosts(), "{name}");
        // A link within a plane is one line; one that closes an axis or leaves the plane
        // is drawn at both ends. The legend has a line an axis.
        let links = LinkGraph::new(slice);
        let lines: usize = links
            .links()
            .filter(|(_, link)| link.direction.positive)
            .map(|(_, link)| 1 + usize::from(link.wraps || link.direction.index() >= 4))
            .sum();
        assert_eq!(count("<line"), lines + names.len(), "{name}");
        assert!(
            count("#9aa0a6") == 0,
            "{name}: every link serves a logical axis"
        );
        assert!(!svg.contains("NaN") && !svg.contains("<a>"), "{name}");
    }
}

#[test]
fn units() {
    assert_eq!(draw::bytes(1536.0), "1.5 KiB");
    assert_eq!(draw::bytes(64.0 * 1048576.0), "64 MiB");
    assert_eq!(draw::duration(1.5e-6), "1.50 us");
    assert_eq!(draw::duration(0.0123), "12.3 ms");
    assert_eq!(draw::duration(125.0), "125 s");
}

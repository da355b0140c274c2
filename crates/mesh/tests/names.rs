//! Names people use, and what the errors say.

use tpu_dist_mesh::{MultiSlice, Slice, parse};

#[test]
fn names_in_use() {
    for (text, name, chips, hosts) in [
        ("v5e:4x4", "v5e:4x4", 16, 4),
        ("v5 lite:4x4", "v5e:4x4", 16, 4),
        ("V5P:2X2X1", "v5p:2x2x1", 4, 1),
        ("v5p=2x2x2", "v5p:2x2x2", 8, 2),
        ("v5p-128", "v5p:4x4x4", 64, 16),
        ("v5p-256", "v5p:4x4x8", 128, 32),
        ("v4-8", "v4:2x2x1", 4, 1),
        ("v4-512", "v4:4x8x8", 256, 64),
        ("v2-8", "v2:2x2", 4, 1),
        ("v3-32", "v3:4x4", 16, 4),
        ("v6e-16", "v6e:4x4", 16, 4),
        ("v6e-8", "v6e:2x4", 8, 1),
        ("v5litepod-8", "v5e:2x4", 8, 1),
        ("v5litepod-256", "v5e:16x16", 256, 64),
        ("tpu7x-8", "v7x:2x2x1", 4, 1),
        ("tpu7x:4x4x8", "v7x:4x4x8", 128, 32),
        ("tpu7x-4x4x8", "v7x:4x4x8", 128, 32),
        ("tpu-v5p-slice:2x2x1", "v5p:2x2x1", 4, 1),
        ("v4:4x4x8_twisted", "v4:4x4x8_twisted", 128, 32),
        ("v4:4x4x8_untwisted", "v4:4x4x8", 128, 32),
        ("v6e:4x4x1", "v6e:4x4", 16, 4),
        ("v5p:2x2", "v5p:2x2x1", 4, 1),
    ] {
        let slice: Slice = text
            .parse()
            .unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(
            (slice.name().as_str(), slice.chips(), slice.hosts()),
            (name, chips, hosts)
        );
    }
    assert_eq!(
        parse::labels("tpu-v5-lite-podslice", "4x8").unwrap().name(),
        "v5e:4x8"
    );
    assert_eq!(
        parse::labels("TPU-V6E", "16x16").unwrap().name(),
        "v6e:16x16"
    );
    assert_eq!(parse::labels("tpu7x", "2x2x2").unwrap().name(), "v7x:2x2x2");
    assert_eq!(
        "3*v5e:4x4".parse::<MultiSlice>().unwrap().device_count(),
        48
    );
}

#[test]
fn accelerator_types_round_trip() {
    for text in [
        "v4-32",
        "v5p-1024",
        "v5litepod-64",
        "v6e-4",
        "tpu7x-128",
        "v3-2048",
    ] {
        assert_eq!(text.parse::<Slice>().unwrap().accelerator_type(), text);
    }
}

#[test]
fn errors_say_what_is_legal() {
    for (text, words) in [
        (
            "v9:4x4",
            "unknown TPU generation \"v9\"; known: v2, v3, v4, v5e, v5p, v6e, v7x",
        ),
        (
            "v5e:3x3",
            "v5e has no slice 3x3; legal: 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16",
        ),
        ("v5e:4x2", "did you mean 2x4?"),
        ("v5p:8x4x4", "did you mean 4x4x8?"),
        (
            "v5p:4x4x6",
            "multiples of 4 up to 256 in ascending order with at most 8960 chips",
        ),
        (
            "v5p:4x4x4_twisted",
            "v5p has no twisted slice 4x4x4; twisted: 4x4x8, 4x8x8",
        ),
        ("v5e:4x4_twisted", "v5e has no twisted slices"),
        (
            "v5p-100",
            "v5p has no slice of 100 cores; legal: 2, 4, 8, 16, 32, 64, 128",
        ),
        ("v6e-12", "v6e has no slice of 12 chips; legal: 1, 4, 8, 16"),
        ("4x4x8", "the generation is missing"),
        ("v5p", "expected generation and extents"),
        ("v5p:", "expected positive extents"),
        ("v5p:4x0x4", "expected positive extents"),
        ("v5p:4", "expected two or three extents"),
        ("v5p:65536x65536x1", "more chips than any slice has"),
        ("x*v5e:4x4", "expected a number of slices before *"),
        ("0*v5e:4x4", "num_slices 0 does not fit v5e:4x4"),
    ] {
        let error = text.parse::<MultiSlice>().expect_err(text).to_string();
        assert!(error.contains(words), "{text}: {error}");
    }
    let slice = || "v5e:4x4".parse::<Slice>().unwrap();
    for (result, words) in [
        (
            slice().with_chips_per_host([3, 1, 1]),
            "each bound must divide [4, 4, 1]",
        ),
        (slice().with_devices_per_chip(2), "v5e shows 1"),
        (
            slice().with_wrap([true, true, true]),
            "an axis needs 3 chips",
        ),
    ] {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

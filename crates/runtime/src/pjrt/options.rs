//! `xla.CompileOptionsProto`, as far as it is used here.
//!
//! Field numbers are those of `xla/pjrt/proto/compile_options.proto` and
//! `xla/xla_data.proto`.

use std::collections::BTreeMap;

use super::error::Error;

/// Value of an XLA option, in the type XLA declares it with.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum OptionOverride {
    String(String),
    Bool(bool),
    Int(i64),
    Double(f64),
}

/// How to compile a program.
#[derive(Clone, Debug, PartialEq)]
pub struct CompileOptions {
    /// Copies of the program that run on different data.
    pub num_replicas: u32,
    /// Parts that one replica is divided into.
    pub num_partitions: u32,
    /// Whether XLA divides the program by its sharding annotations. libtpu wants this
    /// for every program of several partitions, including those without annotations.
    pub use_spmd_partitioning: bool,
    /// Device ids, row by row: replica r's partition p runs on `[r][p]`. Empty leaves the
    /// choice to the plugin.
    pub device_assignment: Vec<Vec<i64>>,
    /// XLA options by name, `xla_cpu_enable_fast_math` for example.
    pub overrides: BTreeMap<String, OptionOverride>,
}

impl Default for CompileOptions {
    /// One replica of one partition.
    fn default() -> CompileOptions {
        CompileOptions {
            num_replicas: 1,
            num_partitions: 1,
            use_spmd_partitioning: false,
            device_assignment: Vec::new(),
            overrides: BTreeMap::new(),
        }
    }
}

impl CompileOptions {
    /// For a program on the one device with this id.
    pub fn for_device(id: i32) -> CompileOptions {
        CompileOptions {
            device_assignment: vec![vec![id.into()]],
            ..CompileOptions::default()
        }
    }

    /// What is wrong with the options, if anything. Plugins do not check all of this:
    /// libtpu accepts the same device twice.
    fn problem(&self) -> Option<String> {
        if self.num_replicas == 0 || self.num_partitions == 0 {
            return Some(format!(
                "expected at least one replica and partition, got {} and {}",
                self.num_replicas, self.num_partitions
            ));
        }
        let rows = &self.device_assignment;
        if rows.is_empty() {
            return None;
        }
        let (replicas, partitions) = (self.num_replicas as usize, self.num_partitions as usize);
        if rows.len() != replicas || rows.iter().any(|row| row.len() != partitions) {
            return Some(format!(
                "expected a device assignment of {replicas} x {partitions}, got rows of {:?}",
                rows.iter().map(Vec::len).collect::<Vec<_>>()
            ));
        }
        let mut ids: Vec<i64> = rows.iter().flatten().copied().collect();
        ids.sort_unstable();
        if let Some(pair) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            return Some(format!(
                "the device assignment names device {} twice",
                pair[0]
            ));
        }
        None
    }

    /// The options as a serialized `CompileOptionsProto`. Equal options give equal bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the device assignment does not fit the numbers of
    /// replicas and partitions, or names a device twice.
    pub fn encode(&self) -> Result<Vec<u8>, Error> {
        if let Some(problem) = self.problem() {
            return Err(Error::argument("options", problem));
        }
        let mut build = Vec::new();
        number(&mut build, 4, self.num_replicas.into());
        number(&mut build, 5, self.num_partitions.into());
        if self.use_spmd_partitioning {
            number(&mut build, 6, 1);
        }
        if !self.device_assignment.is_empty() {
            let mut assignment = Vec::new();
            number(&mut assignment, 1, self.num_replicas.into());
            number(&mut assignment, 2, self.num_partitions.into());
            for partition in 0..self.num_partitions as usize {
                // The message lists, for each partition, its device in every replica.
                let mut ids = Vec::new();
                for replica in &self.device_assignment {
                    varint(&mut ids, replica[partition] as u64);
                }
                let mut computation = Vec::new();
                bytes(&mut computation, 1, &ids);
                bytes(&mut assignment, 3, &computation);
            }
            bytes(&mut build, 9, &assignment);
        }
        let mut options = Vec::new();
        bytes(&mut options, 3, &build);
        for (name, value) in &self.overrides {
            let mut encoded = Vec::new();
            match value {
                OptionOverride::String(text) => bytes(&mut encoded, 1, text.as_bytes()),
                OptionOverride::Bool(switch) => number(&mut encoded, 2, (*switch).into()),
                OptionOverride::Int(value) => number(&mut encoded, 3, *value as u64),
                OptionOverride::Double(value) => {
                    varint(&mut encoded, 4 << 3 | WIRE_FIXED64);
                    encoded.extend_from_slice(&value.to_le_bytes());
                }
            }
            let mut entry = Vec::new();
            bytes(&mut entry, 1, name.as_bytes());
            bytes(&mut entry, 2, &encoded);
            bytes(&mut options, 7, &entry);
        }
        Ok(options)
    }
}

const WIRE_VARINT: u64 = 0;
const WIRE_FIXED64: u64 = 1;
const WIRE_BYTES: u64 = 2;

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn number(out: &mut Vec<u8>, field: u64, value: u64) {
    varint(out, field << 3 | WIRE_VARINT);
    varint(out, value);
}

fn bytes(out: &mut Vec<u8>, field: u64, value: &[u8]) {
    varint(out, field << 3 | WIRE_BYTES);
    varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodes_as_protobuf_does() {
        // Written out by hand from the protobuf encoding rules.
        assert_eq!(
            CompileOptions::default().encode().unwrap(),
            [0x1a, 4, 0x20, 1, 0x28, 1]
        );

        let options = CompileOptions {
            num_replicas: 2,
            num_partitions: 3,
            use_spmd_partitioning: true,
            device_assignment: vec![vec![0, 1, 300], vec![3, 4, 5]],
            overrides: BTreeMap::from([("ab".to_string(), OptionOverride::Int(7))]),
        };
        #[rustfmt::skip]
        let expected = [
            0x1a, 31, // executable_build_options
                0x20, 2, 0x28, 3, 0x30, 1, // replicas, partitions, SPMD
                0x4a, 23, // device_assignment
                    0x08, 2, 0x10, 3,
                    0x1a, 4, 0x0a, 2, 0, 3,
                    0x1a, 4, 0x0a, 2, 1, 4,
                    0x1a, 5, 0x0a, 3, 0xac, 0x02, 5,
            0x3a, 8, 0x0a, 2, b'a', b'b', 0x12, 2, 0x18, 7, // env_option_overrides
        ];
        assert_eq!(options.encode().unwrap(), expected);
    }

    #[test]
    fn says_what_is_wrong() {
        let of = |replicas, partitions, rows: &[&[i64]]| {
            let options = CompileOptions {
                num_replicas: replicas,
                num_partitions: partitions,
                device_assignment: rows.iter().map(|row| row.to_vec()).collect(),
                ..CompileOptions::default()
            };
            options.encode().err().map(|error| error.to_string())
        };
        assert_eq!(of(1, 2, &[]), None);
        assert_eq!(of(2, 2, &[&[0, 1], &[2, 3]]), None);
        for (problem, part) in [
            (of(0, 1, &[]), "at least one"),
            (of(1, 2, &[&[0]]), "1 x 2"),
            (of(2, 1, &[&[0]]), "2 x 1"),
            (of(1, 2, &[&[4, 4]]), "device 4 twice"),
        ] {
            assert!(
                problem.as_deref().is_some_and(|text| text.contains(part)),
                "{problem:?}"
            );
        }
    }
}

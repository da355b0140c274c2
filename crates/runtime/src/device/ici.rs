//! Collectives as programs that the devices of all members run together, over ICI.
//!
//! A device that waits for a partner which runs something else cannot be called back. So the
//! ranks first agree, through the host, on what they are about to do: who does not come, is
//! lost or means something else is told as by any collective, before a program starts.
//!
//! There is a program where libtpu compiles one for the members alone (see [`Placement`]).
//! Programs for all ranks of the job would need ranks that are not members.

use std::collections::HashMap;
use std::mem::forget;
use std::sync::{Arc, Mutex};

use tpu_dist_collectives::lower::{
    Accumulation, Collective, LowerError, Placement, lower, ragged_all_to_all,
};
use tpu_dist_collectives::{DType, Kind, ReduceKind, ReduceOp};
use tpu_dist_mesh::{Coord, Device as Chip, MultiSlice};

use super::cell::Held;
use super::host::{ZeroArray, Zeros};
use super::interned;
use super::{Cell, Device, Error, lock};
use crate::call::Pieces;
use crate::config::{Config, DeviceCollectives};
use crate::executor::Program;
use crate::pjrt::{
    self, Buffer, CompileOptions, DeviceDescription, ElementType, LaunchOptions, Value,
};
use crate::{Call, Communicator, aten};

/// The devices of a group's ranks, and the programs that they have run together.
#[derive(Debug)]
pub(crate) struct Members {
    /// `None` where there is no program for them alone.
    placement: Option<Placement>,
    /// `None` for what does not compile.
    programs: Mutex<HashMap<Key, Option<Arc<Program>>>>,
}

/// What a program is made for. Roots, factors and, where these are ragged, sizes come when it
/// runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    kind: Kind,
    op: Option<ReduceKind>,
    dtype: DType,
    counts: Vec<u64>,
}

/// How a collective runs as a program.
#[derive(Debug)]
pub struct Plan {
    /// `None` where there is nothing to move.
    program: Option<Arc<Program>>,
    element: ElementType,
    input: u64,
    output: u64,
    /// Whether the program is given the result's memory.
    takes_result: bool,
    /// Its last arguments.
    more: Vec<Buffer>,
}

impl Plan {
    /// The elements that the program takes; what the rank brings comes first.
    pub fn input(&self) -> u64 {
        self.input
    }

    /// The elements of the result; what the rank receives comes first, piece after piece.
    pub fn output(&self) -> u64 {
        self.output
    }

    /// Starts the program: `input` and `output` are storages of so many elements.
    ///
    /// # Errors
    /// When the device has no memory left, or an earlier program on which this one depends
    /// is known to have failed.
    pub fn launch(&self, device: &Device, input: &Cell, output: &Cell) -> Result<(), Error> {
        let Some(program) = &self.program else {
            return Ok(());
        };
        let lines = [
            device.line(input, self.element, self.input)?,
            device.line(output, self.element, self.output)?,
        ];
        let mut arguments = vec![lines[0].buffer()];
        if self.takes_result {
            arguments.push(lines[1].buffer());
        }
        arguments.extend(&self.more);
        let outputs = device
            .executor
            .launch(program, &arguments, LaunchOptions::default())?;
        let result = outputs.into_iter().next().expect("programs have a result");
        device.put(output, result)
    }
}

impl Device {
    /// Whether collectives work in place on the memory of storages.
    pub fn works_in_place(&self) -> bool {
        match Config::get().device_collectives {
            DeviceCollectives::Auto => self.executor.client().platform() != "tpu",
            DeviceCollectives::Programs | DeviceCollectives::Copies => false,
        }
    }

    /// Agrees with all members on `call`, whose segments only tell sizes, and finds its program;
    /// `None` where there is none, on all ranks alike.
    ///
    /// # Errors
    /// As [`Communicator::collective`] and its result.
    pub fn plan(&self, group: &Communicator, call: &Call) -> Result<Option<Plan>, crate::Error> {
        if Config::get().device_collectives == DeviceCollectives::Copies {
            return Ok(None);
        }
        group.agree(call)?;
        let members = match group.members().get() {
            Some(members) => members,
            None => {
                let found = Arc::new(self.members(group)?);
                group.members().get_or_init(|| found)
            }
        };
        let Some(placement) = &members.placement else {
            return Ok(None);
        };
        if placement.gathered && matches!(call.dtype, DType::C64 | DType::C128) {
            // libtpu 0.0.52 crashes on these.
            return Ok(None);
        }
        let ranks = group.size() as usize;
        let width = call.dtype.size();
        let elements = |pieces: &Pieces| -> Vec<u64> {
            (0..pieces.len())
                .map(|piece| (pieces.piece_bytes(piece) / width) as u64)
                .collect()
        };
        let (brings, gets) = (elements(&call.input), elements(&call.output));
        let total = |pieces: &[u64]| pieces.iter().sum::<u64>();
        let counts = match call.kind {
            Kind::AllGather => gets.clone(),
            Kind::ReduceScatter => brings.clone(),
            Kind::AllToAll => {
                let sent = exchange(group, &brings)?;
                if sent.iter().any(|count| *count != sent[0]) {
                    return self.plan_ragged(members, placement, call, &sent, group);
                }
                vec![sent[0]]
            }
            Kind::Scatter => vec![total(&gets)],
            _ => vec![total(&brings).max(total(&gets))],
        };
        let most = counts.iter().copied().max().unwrap_or(0);
        let all = match counts.len() {
            1 => counts[0] * ranks as u64,
            _ => total(&counts),
        };
        let (input, output) = match call.kind {
            Kind::AllGather | Kind::Gather => (most, all),
            Kind::ReduceScatter | Kind::Scatter => (all, most),
            Kind::AllToAll => (all, all),
            _ => (most, most),
        };
        let key = Key {
            kind: call.kind,
            op: call.op.map(ReduceOp::kind),
            dtype: call.dtype,
            counts,
        };
        let program = if most == 0 {
            None
        } else {
            let collective = || {
                lower(&Collective {
                    kind: key.kind,
                    op: key.op,
                    dtype: key.dtype,
                    counts: key.counts.clone(),
                    groups: placement.groups.clone(),
                    grid: placement.grid.clone(),
                    accumulation: Accumulation::Wide,
                    gathered: placement.gathered,
                })
            };
            match self.program(group, members, placement, &key, collective)? {
                Some(program) => Some(program),
                None => return Ok(None),
            }
        };
        let mut more = Vec::new();
        if program.is_some() {
            self.arguments(call, group.rank(), &mut more)
                .map_err(|error| crate::Error::Resource(error.to_string()))?;
        }
        Ok(Some(Plan {
            program,
            element: element(call.dtype),
            input,
            output,
            takes_result: false,
            more,
        }))
    }

    /// The scalars of a program.
    fn arguments(&self, call: &Call, rank: u32, more: &mut Vec<Buffer>) -> Result<(), Error> {
        if let Some(ReduceOp::PremulSum(factor)) = call.op {
            let (bytes, element) = match call.dtype {
                DType::F64 | DType::C128 => (factor.to_ne_bytes().to_vec(), ElementType::F64),
                _ => ((factor as f32).to_ne_bytes().to_vec(), ElementType::F32),
            };
            more.push(self.executor.upload(&bytes, element, &[])?);
        }
        if matches!(call.kind, Kind::Broadcast | Kind::Reduce | Kind::Scatter) {
            for number in [call.root, rank] {
                let bytes = number.to_ne_bytes();
                more.push(self.executor.upload(&bytes, ElementType::S32, &[])?);
            }
        }
        Ok(())
    }

    /// `sent` is what each rank sends to each, row by row. Sizes come when the program runs, so that
    /// one serves many: lines are as long as the next power of two.
    fn plan_ragged(
        &self,
        members: &Members,
        placement: &Placement,
        call: &Call,
        sent: &[u64],
        group: &Communicator,
    ) -> Result<Option<Plan>, crate::Error> {
        // Every rank must come to the same answer.
        let (ranks, rank) = (group.size() as usize, group.rank() as usize);
        let row = |from: usize| &sent[from * ranks..][..ranks];
        let column = |to: usize| (0..ranks).map(move |from| sent[from * ranks + to]);
        let input = (0..ranks).map(|from| row(from).iter().sum::<u64>()).max();
        let output = (0..ranks).map(|to| column(to).sum::<u64>()).max();
        let [input, output] = [input, output].map(|most| most.unwrap_or(0).next_power_of_two());
        if placement.gathered || i32::try_from(input.max(output)).is_err() {
            return Ok(None);
        }
        let key = Key {
            kind: Kind::AllToAll,
            op: None,
            dtype: call.dtype,
            counts: vec![input, output],
        };
        let ragged = || ragged_all_to_all(call.dtype, input, output, &placement.groups);
        let Some(program) = self.program(group, members, placement, &key, ragged)? else {
            return Ok(None);
        };
        let before = |counts: &mut dyn Iterator<Item = u64>| -> Vec<u64> {
            counts
                .scan(0, |sum, count| {
                    *sum += count;
                    Some(*sum - count)
                })
                .collect()
        };
        let offsets: Vec<u64> = (0..ranks).map(|to| column(to).take(rank).sum()).collect();
        let more = [
            before(&mut row(rank).iter().copied()),
            row(rank).to_vec(),
            offsets,
            column(rank).collect(),
        ]
        .iter()
        .map(|sizes| {
            let bytes: Vec<u8> = sizes
                .iter()
                .flat_map(|size| (*size as i32).to_ne_bytes())
                .collect();
            self.executor
                .upload(&bytes, ElementType::S32, &[ranks as i64])
        })
        .collect::<Result<Vec<Buffer>, _>>()
        .map_err(|error| crate::Error::Resource(error.to_string()))?;
        Ok(Some(Plan {
            program: Some(program),
            element: element(call.dtype),
            input,
            output,
            takes_result: true,
            more,
        }))
    }

    /// The compiled program, which the first call makes; `None` on all ranks where one of them could
    /// not.
    fn program(
        &self,
        group: &Communicator,
        members: &Members,
        placement: &Placement,
        key: &Key,
        lower: impl FnOnce() -> Result<tpu_dist_collectives::lower::Program, LowerError>,
    ) -> Result<Option<Arc<Program>>, crate::Error> {
        if let Some(program) = lock(&members.programs).get(key) {
            return Ok(program.clone());
        }
        let compiled = match lower() {
            Err(error) => Err(error.to_string()),
            Ok(program) => {
                let devices = placement.devices.iter().map(|id| i64::from(*id)).collect();
                let options = CompileOptions {
                    num_partitions: program.partitions,
                    use_spmd_partitioning: true,
                    device_assignment: vec![devices],
                    ..self.options.clone()
                };
                self.executor
                    .compile_with(program.name, program.text.as_bytes(), &options)
                    .map_err(|error| error.to_string())
            }
        };
        let compiled = compiled
            .inspect_err(|error| tracing::warn!("{}: by way of the host: {error}", key.kind))
            .ok();
        let everywhere = exchange(group, &[u64::from(compiled.is_some())])?;
        let program = compiled.filter(|_| !everywhere.contains(&0));
        lock(&members.programs).insert(key.clone(), program.clone());
        Ok(program)
    }

    /// Where the ranks' devices are. A collective itself.
    fn members(&self, group: &Communicator) -> Result<Members, crate::Error> {
        let failed = |error: pjrt::Error| crate::Error::Resource(error.to_string());
        let client = self.executor.client();
        let own = self.executor.device().description().map_err(failed)?.id;
        let ids = exchange(group, &[own as u64])?;
        let placement = if ids.len() == 1 {
            Some(Placement {
                devices: vec![own as u32],
                groups: vec![vec![0]],
                grid: None,
                gathered: false,
            })
        } else {
            let mut found = Vec::new();
            for device in client.devices() {
                found.push(device.description().map_err(failed)?);
            }
            place(&found, &ids)
        };
        Ok(Members {
            placement,
            programs: Mutex::default(),
        })
    }

    /// A storage's contents as a line of `count` elements.
    fn line(&self, cell: &Cell, element: ElementType, count: u64) -> Result<Arc<Held>, Error> {
        let (held, bytes) = {
            let state = cell.state();
            (state.held.clone(), state.bytes)
        };
        let expected = count * element.size() as u64;
        if bytes != expected {
            return Err(Error::Size {
                expected,
                found: bytes,
            });
        }
        let dims = [count as i64];
        let of = interned::BufferType {
            element,
            dims: dims.to_vec(),
        };
        let Some(held) = held else {
            let zeros = ZeroArray(Zeros::new(bytes as usize), bytes as usize);
            let buffer = self.executor.import(zeros, element, &dims)?.buffer;
            return Ok(Arc::new(Held::new(buffer, interned::id(of), bytes)));
        };
        let found = interned::get(held.of);
        if *found == of {
            return Ok(held);
        }
        let text = aten::line(found.element, &found.dims, element)
            .expect("as many bytes make as many elements");
        let program = self.executor.compile("line", text.as_bytes())?;
        let outputs = self
            .executor
            .launch(&program, &[held.buffer()], LaunchOptions::default())?;
        let line = outputs.into_iter().next().expect("programs have a result");
        Ok(Arc::new(Held::new(line, interned::id(of), bytes)))
    }
}

/// Where the devices with some ids stand, if there is a program for them alone.
fn place(devices: &[DeviceDescription], ids: &[u64]) -> Option<Placement> {
    let kind = &devices.first()?.kind;
    let chips: Vec<Chip> = devices.iter().map(chip).collect::<Option<_>>()?;
    let job = MultiSlice::recognize(kind, &chips)?;
    let ranks = job.devices();
    let members: Vec<u32> = ids
        .iter()
        .map(|id| {
            let at = ranks.iter().position(|chip| u64::from(chip.id) == *id)?;
            Some(at as u32)
        })
        .collect::<Option<_>>()?;
    let placement = Placement::new(&job, &members).ok()?;
    (placement.devices.len() == members.len()).then_some(placement)
}

/// A device as libtpu describes it.
fn chip(device: &DeviceDescription) -> Option<Chip> {
    let number = |name: &str| match device.attributes.get(name) {
        Some(Value::Int(number)) => u32::try_from(*number).ok(),
        _ => None,
    };
    let Some(Value::IntList(coords)) = device.attributes.get("coords") else {
        return None;
    };
    let [x, y, z] = coords[..] else { return None };
    Some(Chip {
        id: u32::try_from(device.id).ok()?,
        coords: Coord([x as u32, y as u32, z as u32]),
        core: number("core_on_chip")?,
        process: u32::try_from(device.process_index).ok()?,
        slice: number("slice_index").unwrap_or(0),
    })
}

/// What each rank says, rank by rank; all say as many numbers.
fn exchange(group: &Communicator, own: &[u64]) -> Result<Vec<u64>, crate::Error> {
    let bytes = size_of_val(own);
    let own = own.to_vec();
    let mut all = vec![0u64; own.len() * group.size() as usize];
    let mut call = Call::new(Kind::AllGather, DType::U64);
    call.input.push(own.as_ptr() as *mut u8, bytes);
    call.input.end_piece();
    for piece in all.chunks_mut(own.len()) {
        call.output.push(piece.as_mut_ptr().cast(), bytes);
        call.output.end_piece();
    }
    // SAFETY: a call that is not asynchronous has ended when it returns without an error; where
    // it was interrupted, the memory is left to it for good.
    match unsafe { group.collective(call, None) } {
        Ok(operation) => operation.result().expect("it has ended")?,
        Err(error) => {
            forget((own, all));
            return Err(error);
        }
    }
    Ok(all)
}

/// The type in which buffers have elements of `dtype`; for what XLA has no type for, that of
/// their bytes, as in [`tpu_dist_collectives::lower`].
fn element(dtype: DType) -> ElementType {
    ElementType::from_dtype(dtype).unwrap_or(match dtype {
        DType::C32 => ElementType::U32,
        DType::QI32 => ElementType::S32,
        DType::QI8 => ElementType::S8,
        _ => ElementType::U8,
    })
}

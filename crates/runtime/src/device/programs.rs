//! Programs by the calls that they serve.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use foldhash::fast::RandomState;
use smallvec::SmallVec;

use super::cell::{Cell, Held};
use super::interned::{self, BufferType, TypeId};
use super::{Device, Error, lock, words};
use crate::aten::{self, Lowered, Number, Output};
use crate::executor::Program;
use crate::pjrt::{Buffer, ElementType, LaunchOptions};

/// Programs to know. When there are more, all are forgotten; the compile cache then still has
/// those that were used last.
const MAX_PROGRAMS: usize = 4096;

/// A call of an operator.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// What is called, as [`words`].
    pub words: &'a [u64],
    /// The storages, each once, by their numbers in the words.
    pub cells: &'a [&'a Cell],
    /// Values of run-time scalars, by their indices in the words.
    pub scalars: &'a [Number],
    /// Seed and offset for random numbers.
    pub random: [u64; 2],
}

/// What became of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Its program is under way.
    Launched,
    /// There is no program for it yet: [`Device::define`] makes one.
    Unknown,
    /// There is none for it, and why.
    Unsupported(Arc<str>),
}

/// Results of a call.
#[derive(Debug, Default)]
pub struct Results {
    /// What they are: the words given to [`Device::define`].
    pub words: Vec<u64>,
    /// Storages of the new ones, in order.
    pub cells: Vec<Box<Cell>>,
    /// By how much to move the offset of the random numbers.
    pub draws: u64,
}

struct Made {
    output: Output,
    of: TypeId,
    bytes: u64,
}

struct Entry {
    program: Arc<Program>,
    /// Storages that are parameters, in order.
    parameters: SmallVec<[usize; 4]>,
    /// Storages that may be taken over.
    donate: SmallVec<[usize; 2]>,
    scalars: SmallVec<[ElementType; 2]>,
    random: bool,
    outputs: SmallVec<[Made; 2]>,
    results: Box<[u64]>,
    draws: u64,
}

#[derive(Clone)]
enum Known {
    Program(Arc<Entry>),
    Unsupported(Arc<str>),
}

type Table = HashMap<Box<[u64]>, Known, RandomState>;

#[derive(Default)]
pub(super) struct Programs(Mutex<Table>);

impl std::fmt::Debug for Programs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Programs({})", lock(&self.0).len())
    }
}

type Holds = SmallVec<[Option<Arc<Held>>; 8]>;

thread_local! {
    static KEY: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Calls `body` with what decides which program serves a call, and with its storages' buffers.
fn with_key<R>(call: &Call<'_>, body: impl FnOnce(&[u64], Holds) -> R) -> R {
    KEY.with_borrow_mut(|key| {
        key.clear();
        key.extend_from_slice(call.words);
        let mut holds = Holds::new();
        for cell in call.cells {
            let state = cell.state();
            let held = state.held.clone();
            key.push(state.bytes);
            key.push(held.as_ref().map_or(u64::MAX, |held| held.of.number()));
            holds.push(held);
        }
        body(key, holds)
    })
}

impl Device {
    /// Starts the program of a call, if there is one, and writes what it wrote into the storages.
    /// `results` is filled anew.
    ///
    /// # Errors
    /// As [`Executor::launch`](crate::executor::Executor::launch).
    pub fn launch(&self, call: &Call<'_>, results: &mut Results) -> Result<Outcome, Error> {
        let (known, holds) = with_key(call, |key, holds| {
            (lock(&self.programs.0).get(key).cloned(), holds)
        });
        match known {
            None => Ok(Outcome::Unknown),
            Some(Known::Unsupported(reason)) => Ok(Outcome::Unsupported(reason)),
            Some(Known::Program(entry)) => {
                self.run(&entry, call, holds, results)?;
                Ok(Outcome::Launched)
            }
        }
    }

    fn run(
        &self,
        entry: &Entry,
        call: &Call<'_>,
        mut holds: Holds,
        results: &mut Results,
    ) -> Result<(), Error> {
        // A buffer is taken over only if this call is all that knows it.
        let mut keep = SmallVec::<[i64; 4]>::new();
        for &storage in &entry.donate {
            let mut state = call.cells[storage].state();
            let ours = holds[storage].as_ref();
            if let (Some(current), Some(ours)) = (&state.held, ours)
                && Arc::ptr_eq(current, ours)
            {
                state.held = None;
            }
            drop(state);
            if ours.is_some_and(|held| Arc::strong_count(held) > 1) {
                let parameter = entry.parameters.iter().position(|it| *it == storage);
                keep.extend(parameter.map(|parameter| parameter as i64));
            }
        }

        let launched = self.start(entry, call, &holds, &keep);
        let outputs = match launched {
            Ok(outputs) => outputs,
            Err(error) => {
                // What was not taken over is as it was.
                for &storage in &entry.donate {
                    let mut state = call.cells[storage].state();
                    if state.held.is_none() {
                        state.held = holds[storage].take();
                    }
                }
                return Err(error);
            }
        };
        results.cells.clear();
        for (buffer, made) in outputs.into_iter().zip(&entry.outputs) {
            let held = Held::new(buffer, made.of, made.bytes);
            match made.output {
                Output::Result(_) => {
                    let cell = Cell::with(held, made.bytes);
                    results.cells.push(Box::new(cell));
                }
                Output::Storage(storage) => {
                    let held = Some(Arc::new(held));
                    let _old = std::mem::replace(&mut call.cells[storage].state().held, held);
                }
            }
        }
        results.words.clear();
        results.words.extend_from_slice(&entry.results);
        results.draws = entry.draws;
        Ok(())
    }

    fn start(
        &self,
        entry: &Entry,
        call: &Call<'_>,
        holds: &Holds,
        keep: &[i64],
    ) -> Result<crate::pjrt::Outputs, Error> {
        let mut scalars = SmallVec::<[Arc<Buffer>; 4]>::new();
        for (number, element) in call.scalars.iter().zip(&entry.scalars) {
            scalars.push(self.scalars.get(&self.executor, *number, *element)?);
        }
        let random = if entry.random {
            let [seed, offset] = call.random.map(u64::to_ne_bytes);
            let state = [seed, offset].concat();
            Some(self.executor.upload(&state, ElementType::U64, &[2])?)
        } else {
            None
        };
        let mut arguments = SmallVec::<[&Buffer; 8]>::new();
        let storages = entry.parameters.iter();
        // The key says that they are there.
        arguments.extend(
            storages.filter_map(|storage| holds[*storage].as_ref().map(|held| held.buffer())),
        );
        arguments.extend(scalars.iter().map(|scalar| &**scalar));
        arguments.extend(&random);
        let options = LaunchOptions {
            keep,
            ..LaunchOptions::default()
        };
        Ok(self.executor.launch(&entry.program, &arguments, options)?)
    }

    /// Makes the program of a call, with `results` as its results. Nothing is started. A call
    /// without a program is remembered as such.
    ///
    /// # Errors
    /// When the words say nothing, or the program does not compile.
    pub fn define(&self, call: &Call<'_>, results: &[u64]) -> Result<(), Error> {
        let storages: Vec<_> = call
            .cells
            .iter()
            .map(|cell| {
                let state = cell.state();
                let buffer = state.held.as_ref().map(|held| interned::get(held.of));
                (state.bytes, buffer)
            })
            .collect();
        let bytes: Vec<u64> = storages.iter().map(|(bytes, _)| *bytes).collect();
        let row = aten::operators().nth(words::operator(call.words));
        let Some(row) = row else {
            return Err(Error::Words {
                at: 0,
                word: call.words.first().copied().unwrap_or_default(),
            });
        };
        let request = words::request(row.name, call.words, storages.into_iter(), results)?;
        let known = match aten::lower_with(&request, words::precision(call.words)) {
            Some(Ok(lowered)) => {
                let text = lowered.text.as_bytes();
                let program = self.executor.compile_with(row.name, text, &self.options)?;
                let entry = entry(program, lowered, &request, &bytes, results);
                Known::Program(Arc::new(entry))
            }
            Some(Err(error)) => {
                if matches!(error, aten::Error::Malformed { .. }) {
                    tracing::error!(%error, "the call runs on the CPU");
                }
                Known::Unsupported(error.to_string().into())
            }
            None => Known::Unsupported("no lowering".into()),
        };
        self.remember(call, known);
        Ok(())
    }

    /// Remembers that a call has no program.
    pub fn define_unsupported(&self, call: &Call<'_>, reason: &str) {
        self.remember(call, Known::Unsupported(reason.into()));
    }

    fn remember(&self, call: &Call<'_>, known: Known) {
        with_key(call, |key, _| {
            let mut table = lock(&self.programs.0);
            if table.len() >= MAX_PROGRAMS {
                table.clear();
            }
            table.insert(key.into(), known);
        });
    }
}

fn entry(
    program: Arc<Program>,
    lowered: Lowered,
    request: &aten::Request<'_>,
    bytes: &[u64],
    results: &[u64],
) -> Entry {
    let outputs = lowered.outputs.iter().zip(lowered.types);
    let made = outputs.map(|(output, (element, dims))| {
        let count: i64 = dims.iter().product();
        Made {
            output: *output,
            bytes: match output {
                Output::Result(_) => count as u64 * element.size() as u64,
                Output::Storage(storage) => bytes[*storage],
            },
            of: interned::id(BufferType { element, dims }),
        }
    });
    let present = request.storages.iter().enumerate();
    let elements = request.results.iter().flatten();
    Entry {
        program,
        parameters: present
            .filter_map(|(storage, of)| (!of.absent).then_some(storage))
            .collect(),
        donate: lowered.donate.into(),
        scalars: lowered.scalars.into(),
        random: lowered.random,
        outputs: made.collect(),
        results: results.into(),
        draws: elements
            .map(|result| result.view.sizes.iter().product::<i64>() as u64)
            .max()
            .unwrap_or_default(),
    }
}

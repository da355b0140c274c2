//! ATen operators lowered to StableHLO, compiled and run on the CPU plugins installed here.

mod aten_samples;
mod pjrt_support;

use std::collections::BTreeSet;

use tpu_dist_runtime::aten::{
    self, Argument, Destination, Error, Kind, Lowered, Number, Operand, Output, Request,
    ResultType, Scalar, StorageType, View,
};
use tpu_dist_runtime::executor::{Config, Executor};
use tpu_dist_runtime::pjrt::{Buffer, ElementType, LaunchOptions};

fn executors() -> Vec<Executor> {
    pjrt_support::cpu_plugins()
        .iter()
        .map(|plugin| Executor::open(&Config::new(plugin.path())).unwrap())
        .collect()
}

fn lower(request: &Request<'_>) -> Lowered {
    aten::lower(request)
        .expect("a row")
        .unwrap_or_else(|error| panic!("{error}: {request:?}"))
}

/// Runs a program on the bytes of its parameters.
fn run(
    executor: &Executor,
    lowered: &Lowered,
    parameters: &[(ElementType, Vec<i64>, Vec<u8>)],
) -> Result<Vec<Vec<u8>>, String> {
    let text = |error: tpu_dist_runtime::executor::Error| format!("{error}\n{}", lowered.text);
    let program = executor
        .compile_with("aten", lowered.text.as_bytes(), &aten::compile_options(0))
        .map_err(text)?;
    let buffers: Vec<Buffer> = parameters
        .iter()
        .map(|(element, dims, bytes)| executor.upload(bytes, *element, dims).unwrap())
        .collect();
    let references: Vec<&Buffer> = buffers.iter().collect();
    let outputs = executor
        .launch(&program, &references, LaunchOptions::default())
        .map_err(text)?;
    let types: Vec<_> = (outputs.iter())
        .map(|output| {
            (
                output.element_type().unwrap(),
                output.dims().unwrap().to_vec(),
            )
        })
        .collect();
    if types != lowered.types {
        return Err(format!("{types:?} are not {:?}", lowered.types));
    }
    outputs
        .iter()
        .map(|output| {
            let mut bytes = vec![0; output.host_bytes().unwrap()];
            executor.download(output, &mut bytes).map_err(text)?;
            Ok(bytes)
        })
        .collect()
}

fn int_bytes(values: &[i32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect()
}

fn int_values(bytes: &[u8]) -> Vec<i32> {
    bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|value| i32::from_ne_bytes(*value))
        .collect()
}

#[test]
fn every_row_has_a_sample() {
    let sampled: BTreeSet<&str> = aten_samples::samples()
        .map(|line| line.split(' ').next().unwrap())
        .collect();
    let rows: BTreeSet<&str> = aten::operators().map(|row| row.name).collect();
    assert_eq!(sampled, rows);
}

/// Compiles and runs each sample on zeros: programs are well-formed, and of the types they claim.
#[test]
fn every_row_runs() {
    for executor in executors() {
        let mut failures = Vec::new();
        for line in aten_samples::samples() {
            let request = aten_samples::parse(line);
            let lowered = lower(&request);
            let zeros = |element: ElementType, dims: &[i64]| {
                let count: i64 = dims.iter().product();
                (
                    element,
                    dims.to_vec(),
                    vec![0; count as usize * element.size()],
                )
            };
            let storages = request
                .storages
                .iter()
                .map(|ty| zeros(ty.element, &ty.dims));
            let scalars = lowered.scalars.iter().map(|&element| zeros(element, &[]));
            let state = lowered.random.then(|| zeros(ElementType::U64, &[2]));
            let parameters: Vec<_> = storages.chain(scalars).chain(state).collect();
            if let Err(error) = run(&executor, &lowered, &parameters) {
                failures.push(format!("{line}\n{error}"));
            }
        }
        assert!(failures.is_empty(), "{}", failures.join("\n"));
    }
}

/// Places of a view's elements in its storage, in row-major order.
fn places(view: &View) -> Vec<usize> {
    let mut places = vec![view.offset];
    for (&size, &stride) in view.sizes.iter().zip(&view.strides) {
        places = places
            .iter()
            .flat_map(|&place| (0..size).map(move |index| place + index * stride))
            .collect();
    }
    places.into_iter().map(|place| place as usize).collect()
}

fn view(sizes: &[i64], strides: &[i64], offset: i64) -> View {
    View {
        sizes: sizes.to_vec(),
        strides: strides.to_vec(),
        offset,
    }
}

fn storage(element: ElementType, dims: &[i64]) -> StorageType {
    StorageType {
        element,
        dims: dims.to_vec(),
        absent: false,
        bytes: dims.iter().product::<i64>() as u64 * element.size() as u64,
    }
}

fn operand(element: ElementType, storage: usize, view: View) -> Operand {
    Operand {
        storage,
        element,
        view,
    }
}

fn new(element: ElementType, view: View) -> Option<ResultType> {
    Some(ResultType {
        element,
        view,
        destination: Destination::New,
    })
}

fn into(element: ElementType, storage: usize, view: View) -> Option<ResultType> {
    Some(ResultType {
        element,
        view: view.clone(),
        destination: Destination::Into { storage, view },
    })
}

/// Buffers' dimensions, and views of them: without overlap first.
fn views() -> Vec<(&'static str, Vec<i64>, View)> {
    vec![
        ("whole", vec![3, 4], view(&[3, 4], &[4, 1], 0)),
        (
            "other dimensions",
            vec![12],
            view(&[2, 2, 3], &[6, 3, 1], 0),
        ),
        ("joined dimensions", vec![3, 4], view(&[12], &[1], 0)),
        ("transposed", vec![3, 4], view(&[4, 3], &[1, 4], 0)),
        (
            "channels last",
            vec![2, 4, 5, 3],
            view(&[2, 3, 4, 5], &[60, 1, 15, 3], 0),
        ),
        ("row", vec![3, 4], view(&[4], &[1], 4)),
        ("column", vec![3, 4], view(&[3], &[4], 2)),
        ("rows", vec![5, 4], view(&[2, 4], &[4, 1], 8)),
        ("columns", vec![3, 4], view(&[3, 2], &[4, 1], 1)),
        ("every second row", vec![6, 4], view(&[3, 4], &[8, 1], 4)),
        (
            "every second row of an odd number",
            vec![5, 4],
            view(&[3, 4], &[8, 1], 0),
        ),
        (
            "every second column of an odd number",
            vec![3, 5],
            view(&[3, 2], &[5, 2], 1),
        ),
        ("steps in both", vec![7, 9], view(&[2, 3], &[27, 4], 9)),
        ("block, transposed", vec![6, 8], view(&[3, 2], &[1, 8], 18)),
        ("part of joined dimensions", vec![4, 6], view(&[7], &[1], 5)),
        (
            "matrix in a longer vector",
            vec![19],
            view(&[3, 4], &[4, 1], 5),
        ),
        ("ones", vec![3, 4], view(&[1, 3, 1, 4], &[7, 4, 9, 1], 0)),
        ("diagonal", vec![4, 4], view(&[4], &[5], 0)),
        ("one element", vec![3, 4], view(&[], &[], 7)),
        ("nothing", vec![3, 4], view(&[0, 4], &[4, 1], 12)),
        ("expanded", vec![3, 4], view(&[2, 3, 4], &[0, 4, 1], 0)),
        ("expanded row", vec![3, 4], view(&[5, 4], &[0, 1], 4)),
        ("windows", vec![6], view(&[4, 3], &[1, 1], 0)),
        (
            "windows of rows",
            vec![5, 2],
            view(&[2, 3, 2], &[2, 2, 1], 2),
        ),
    ]
}

fn overlaps(view: &View) -> bool {
    let all = places(view);
    let distinct: BTreeSet<_> = all.iter().collect();
    distinct.len() < all.len()
}

#[test]
fn views_are_read() {
    for executor in executors() {
        for (name, dims, view) in views() {
            let data: Vec<i32> = (0..dims.iter().product::<i64>() as i32)
                .map(|i| 10 + i)
                .collect();
            let request = Request {
                operator: "clone",
                arguments: vec![
                    Argument::Tensor(operand(ElementType::S32, 0, view.clone())),
                    Argument::None,
                ],
                storages: vec![storage(ElementType::S32, &dims)],
                results: vec![new(ElementType::S32, View::contiguous(&view.sizes))],
            };
            let lowered = lower(&request);
            let results = run(
                &executor,
                &lowered,
                &[(ElementType::S32, dims, int_bytes(&data))],
            )
            .unwrap();
            let expected: Vec<i32> = places(&view).into_iter().map(|place| data[place]).collect();
            assert_eq!(
                int_values(&results[0]),
                expected,
                "{name}\n{}",
                lowered.text
            );
            // Only what is no slice in any dimensions takes a gather.
            let gathers = [
                "diagonal",
                "windows",
                "windows of rows",
                "part of joined dimensions",
            ];
            if !gathers.contains(&name) {
                assert!(!lowered.text.contains("gather"), "{name}\n{}", lowered.text);
            }
        }
    }
}

#[test]
fn views_are_written() {
    for executor in executors() {
        for (name, dims, view) in views().into_iter().filter(|(_, _, view)| !overlaps(view)) {
            let count = dims.iter().product::<i64>() as i32;
            let old: Vec<i32> = (0..count).map(|i| -1 - i).collect();
            let source: Vec<i32> = (0..places(&view).len() as i32).map(|i| 10 + i).collect();
            let sizes = &view.sizes;
            let mut request = Request {
                operator: "copy_",
                arguments: vec![
                    Argument::Tensor(operand(ElementType::S32, 0, view.clone())),
                    Argument::Tensor(operand(ElementType::S32, 1, View::contiguous(sizes))),
                    Argument::Bool(false),
                ],
                storages: vec![
                    storage(ElementType::S32, &dims),
                    storage(ElementType::S32, sizes),
                ],
                results: vec![into(ElementType::S32, 0, view.clone())],
            };
            let from = (ElementType::S32, sizes.clone(), int_bytes(&source));
            let mut expected = old.clone();
            for (place, value) in places(&view).into_iter().zip(&source) {
                expected[place] = *value;
            }
            let lowered = lower(&request);
            assert_eq!(lowered.outputs, [Output::Storage(0)], "{name}");
            let parameters = [
                (ElementType::S32, dims.clone(), int_bytes(&old)),
                from.clone(),
            ];
            let results = run(&executor, &lowered, &parameters).unwrap();
            assert_eq!(
                int_values(&results[0]),
                expected,
                "{name}\n{}",
                lowered.text
            );
            // A part leaves the buffer's type as it is, and takes its memory.
            if places(&view).len() < old.len() {
                assert_eq!(lowered.types, [(ElementType::S32, dims.clone())], "{name}");
                assert_eq!(lowered.donate, [0], "{name}");
            }
            // What was never written reads as zeros, and is no parameter.
            request.storages[0].absent = true;
            for (place, value) in expected.iter_mut().enumerate() {
                if *value == old[place] {
                    *value = 0;
                }
            }
            let lowered = lower(&request);
            let results = run(&executor, &lowered, &[from]).unwrap();
            assert_eq!(
                int_values(&results[0]),
                expected,
                "{name}, absent\n{}",
                lowered.text
            );
        }
    }
}

/// A buffer of one type read and written as another.
#[test]
fn bits_are_seen_as_other_types() {
    use ElementType::{BF16, C64, F32, Pred, S32, S64, U8};
    let data: Vec<u8> = (0..48).map(|i| i * 5 + 1).collect();
    let bits: Vec<u8> = (0..48).map(|i| i % 2).collect();
    for executor in executors() {
        for (from, to) in [
            (F32, BF16),
            (BF16, F32),
            (S32, F32),
            (U8, S64),
            (S64, U8),
            (C64, F32),
            (F32, C64),
            (C64, S32),
            (Pred, U8),
            (U8, Pred),
            (Pred, S32),
            (S32, Pred),
        ] {
            let data = if from == Pred || to == Pred {
                &bits
            } else {
                &data
            };
            let size = |element: ElementType| 48 / element.size() as i64;
            let whole = View::contiguous(&[size(to)]);
            // The second half of the storage gets the first.
            let half = view(&[size(to) / 2], &[1], 0);
            let second = view(&[size(to) / 2], &[1], size(to) / 2);
            let mut request = Request {
                operator: "clone",
                arguments: vec![
                    Argument::Tensor(operand(to, 0, whole.clone())),
                    Argument::None,
                ],
                storages: vec![storage(from, &[2, size(from) / 2])],
                results: vec![new(to, whole)],
            };
            let parameters = [(from, vec![2, size(from) / 2], data.clone())];
            let results = run(&executor, &lower(&request), &parameters).unwrap();
            assert_eq!(&results[0], data, "{from:?} as {to:?}");

            request.operator = "copy_";
            request.arguments = [&second, &half]
                .map(|view| Argument::Tensor(operand(to, 0, view.clone())))
                .to_vec();
            request.results = vec![into(to, 0, second)];
            let lowered = lower(&request);
            assert_eq!(
                lowered.types,
                [(from, vec![2, size(from) / 2])],
                "{from:?} as {to:?}"
            );
            let results = run(&executor, &lowered, &parameters).unwrap();
            assert_eq!(
                results[0],
                [&data[..24], &data[..24]].concat(),
                "{from:?} as {to:?}"
            );
        }
    }
}

#[test]
fn new_tensors_come_in_memory_order() {
    // 2 samples of 3 channels of 2 x 2, channels last.
    let sizes = [2, 3, 2, 2];
    let last = view(&sizes, &[12, 1, 6, 3], 0);
    for executor in executors() {
        let request = Request {
            operator: "clone",
            arguments: vec![
                Argument::Tensor(operand(ElementType::S32, 0, View::contiguous(&sizes))),
                Argument::None,
            ],
            storages: vec![storage(ElementType::S32, &sizes)],
            results: vec![new(ElementType::S32, last.clone())],
        };
        let lowered = lower(&request);
        assert_eq!(lowered.types, [(ElementType::S32, vec![2, 2, 2, 3])]);
        let data: Vec<i32> = (0..24).collect();
        let parameters = [(ElementType::S32, sizes.to_vec(), int_bytes(&data))];
        let results = run(&executor, &lowered, &parameters).unwrap();
        let memory = int_values(&results[0]);
        let seen: Vec<i32> = places(&last)
            .into_iter()
            .map(|place| memory[place])
            .collect();
        assert_eq!(seen, data);
    }
}

/// Two results into one storage, which is an operand too, with a number known at run time.
#[test]
fn results_share_a_storage() {
    for executor in executors() {
        let halves = [view(&[2], &[1], 0), view(&[2], &[1], 2)];
        let operands = halves
            .clone()
            .map(|half| Some(operand(ElementType::F32, 0, half)));
        let request = Request {
            operator: "_foreach_mul.Scalar",
            arguments: vec![
                Argument::Tensors(operands.to_vec()),
                Argument::Scalar(Scalar::Runtime {
                    index: 0,
                    kind: Kind::Float,
                }),
            ],
            storages: vec![storage(ElementType::F32, &[4])],
            results: halves.map(|half| into(ElementType::F32, 0, half)).to_vec(),
        };
        let lowered = lower(&request);
        assert_eq!(lowered.outputs, [Output::Storage(0)]);
        assert_eq!(lowered.scalars, [ElementType::F32]);
        assert_eq!(lowered.donate, [0]);
        let parameters = [
            (
                ElementType::F32,
                vec![4],
                pjrt_support::bytes(&[1., 2., 3., 4.]),
            ),
            (ElementType::F32, vec![], pjrt_support::bytes(&[10.])),
        ];
        let results = run(&executor, &lowered, &parameters).unwrap();
        assert_eq!(pjrt_support::floats(&results[0]), [10., 20., 30., 40.]);
    }
}

/// Results of calls on chosen numbers, against torch's documented results.
#[test]
fn values_are_torch_s() {
    let nan = f32::NAN;
    let infinity = f32::INFINITY;
    #[rustfmt::skip]
    type Case<'a> = (&'a str, &'a [&'a [f32]], &'a [f32]);
    let cases: &[Case] = &[
        (
            "maximum f32[3] f32[3] -> f32[3]",
            &[&[1., nan, 3.], &[2., 0., nan]],
            &[2., nan, nan],
        ),
        (
            "fmin f32[3] f32[3] -> f32[3]",
            &[&[1., nan, 3.], &[2., 0., nan]],
            &[1., 0., 3.],
        ),
        (
            "amax f32[2,2] [1] b0 -> f32[2]",
            &[&[1., nan, -3., -infinity]],
            &[nan, -3.],
        ),
        (
            "round f32[5] -> f32[5]",
            &[&[0.5, 1.5, 2.5, -0.5, -1.5]],
            &[0., 2., 2., -0., -2.],
        ),
        (
            "trunc f32[3] -> f32[3]",
            &[&[1.7, -1.7, -0.3]],
            &[1., -1., -0.],
        ),
        (
            "sign f32[4] -> f32[4]",
            &[&[-2., 0., 3., nan]],
            &[-1., 0., 1., 0.],
        ),
        (
            "remainder.Tensor f32[4] f32[4] -> f32[4]",
            &[&[5., -5., 5., -5.], &[3., 3., -3., -3.]],
            &[2., 1., -1., -2.],
        ),
        (
            "fmod.Tensor f32[4] f32[4] -> f32[4]",
            &[&[5., -5., 5., -5.], &[3., 3., -3., -3.]],
            &[2., -2., 2., -2.],
        ),
        (
            "div.Tensor_mode f32[4] f32[4] \"floor\" -> f32[4]",
            &[&[5., -5., 1., 0.], &[3., 3., 0., -3.]],
            &[1., -2., infinity, -0.],
        ),
        (
            "div.Tensor_mode f32[2] f32[2] \"trunc\" -> f32[2]",
            &[&[5., -5.], &[3., 3.]],
            &[1., -1.],
        ),
        (
            "clamp f32[4] s-1 s1 -> f32[4]",
            &[&[-2., 0.5, 2., nan]],
            &[-1., 0.5, 1., nan],
        ),
        (
            "cumsum f32[2,3] n1 - -> f32[2,3]",
            &[&[1., 2., 3., 4., 5., 6.]],
            &[1., 3., 6., 4., 9., 15.],
        ),
        (
            "sort f32[4] n0 b0 -> f32[4] i64[4]",
            &[&[3., nan, -infinity, 1.]],
            &[-infinity, 1., 3., nan],
        ),
        (
            "sort f32[4] n0 b1 -> f32[4] i64[4]",
            &[&[3., nan, -infinity, 1.]],
            &[nan, 3., 1., -infinity],
        ),
        (
            "topk f32[4] n2 n-1 b1 b1 -> f32[2] i64[2]",
            &[&[3., 7., -1., 5.]],
            &[7., 5.],
        ),
        (
            "roll f32[4] [1] [] -> f32[4]",
            &[&[1., 2., 3., 4.]],
            &[4., 1., 2., 3.],
        ),
        (
            "constant_pad_nd f32[3] [-1,2] s9 -> f32[4]",
            &[&[1., 2., 3.]],
            &[2., 3., 9., 9.],
        ),
        (
            "addmm f32[2] f32[1,2] f32[2,2] s0 s2 -> f32[1,2]",
            &[&[nan, nan], &[1., 2.], &[3., 4., 5., 6.]],
            &[26., 32.],
        ),
        (
            "var.correction f32[4] [0] s1 b0 -> f32[]",
            &[&[1., 2., 3., 4.]],
            &[5. / 3.],
        ),
        (
            "logsumexp f32[2] [0] b0 -> f32[]",
            &[&[-infinity, -infinity]],
            &[-infinity],
        ),
        (
            "erf f32[4] -> f32[4]",
            &[&[0., 0.5, -1.5, 9.]],
            &[0., 0.520_499_9, -0.966_105_15, 1.],
        ),
        (
            "erfc f32[3] -> f32[3]",
            &[&[0., 3., -2.]],
            &[1., 2.209_05e-5, 1.995_322_3],
        ),
        (
            "erfinv f32[4] -> f32[4]",
            &[&[0., 0.5, -0.9, 1.]],
            &[0., 0.476_936_28, -1.163_087_2, infinity],
        ),
        (
            "avg_pool2d f32[1,3,3] [2,2] [2,2] [0,0] b1 b1 - -> f32[1,2,2]",
            &[&[1., 2., 3., 4., 5., 6., 7., 8., 9.]],
            &[3., 4.5, 7.5, 9.],
        ),
        (
            "max_pool2d_with_indices_backward f32[1,1,2] f32[1,2,3] [2,2] [1,1] [0,0] [1,1] b0 i64[1,1,2] -> f32[1,2,3]",
            &[&[10., 20.], &[1., 5., 2., 5., 0., 5.]],
            &[0., 30., 0., 0., 0., 0.],
        ),
        (
            "_adaptive_avg_pool2d f32[1,1,3] [1,2] -> f32[1,1,2]",
            &[&[1., 2., 6.]],
            &[1.5, 4.],
        ),
        (
            "linspace.out s0 s1 n5 -> f32[5]",
            &[],
            &[0., 0.25, 0.5, 0.75, 1.],
        ),
        (
            "tril f32[2,3] n-1 -> f32[2,3]",
            &[&[1., 2., 3., 4., 5., 6.]],
            &[0., 0., 0., 4., 0., 0.],
        ),
        (
            "slice_backward f32[2] [5] n0 n1 n5 n2 -> f32[5]",
            &[&[7., 8.]],
            &[0., 7., 0., 8., 0.],
        ),
        (
            "native_layer_norm f32[2] [2] - - x0 -> f32[2] f32[1] f32[1]",
            &[&[1., 3.]],
            &[-1., 1.],
        ),
        // One step from zero moments: the parameter less rate times the gradient's sign.
        (
            "_fused_adamw_ {f32[2]} {f32[2]} {f32[2]} {f32[2]} {} {f32[]} x0.1 x0.9 x0.99 x0 x0 b0 b0 - - -> @0.0 @1.0 @2.0 @3.0",
            &[&[1., 2.], &[5., -5.], &[0., 0.], &[0., 0.], &[1.]],
            &[0.9, 2.1],
        ),
        // Skipped, because a gradient was not finite.
        (
            "_fused_sgd_ {f32[1]} {f32[1]} {} x0 x0 x1 x0 b0 b0 b1 f32[] f32[] -> @0.0 @1.0",
            &[&[1.], &[5.], &[1.], &[1.]],
            &[1.],
        ),
    ];
    for executor in executors() {
        for (line, inputs, expected) in cases {
            let request = aten_samples::parse(line);
            let lowered = lower(&request);
            let mut inputs = inputs.iter();
            let parameters: Vec<_> = request
                .storages
                .iter()
                .map(|ty| {
                    // Indices are not used where they are not given.
                    let bytes = match ty.element {
                        ElementType::F32 => pjrt_support::bytes(inputs.next().unwrap()),
                        _ => vec![0; ty.bytes as usize],
                    };
                    (ty.element, ty.dims.clone(), bytes)
                })
                .collect();
            let results = run(&executor, &lowered, &parameters).unwrap();
            let got = pjrt_support::floats(&results[0]);
            let close = |(a, b): (&f32, &f32)| {
                a == b && a.is_sign_negative() == b.is_sign_negative()
                    || a.is_nan() && b.is_nan()
                    || (a - b).abs() <= 1e-6 * b.abs()
            };
            assert!(
                got.len() == expected.len() && got.iter().zip(*expected).all(close),
                "{line}: {got:?}, expected {expected:?}"
            );
        }
    }
}

/// Draws from each distribution have its mean and deviation, and depend on the state alone.
#[test]
fn random_numbers_have_their_distribution() {
    const COUNT: usize = 20_000;
    for executor in executors() {
        for (line, mean, deviation, least, greatest) in [
            (
                "uniform_ f32[20000] x-1 x3 _ -> @0",
                1.,
                4. / 12f64.sqrt(),
                -1.,
                3.,
            ),
            ("normal_ f32[20000] x2 x0.5 _ -> @0", 2., 0.5, -1., 5.),
            ("exponential_ f32[20000] x2 _ -> @0", 0.5, 0.5, 0., 20.),
            (
                "bernoulli_.float f32[20000] x0.3 _ -> @0",
                0.3,
                0.21f64.sqrt(),
                0.,
                1.,
            ),
            (
                "random_.from f32[20000] n-10 n11 _ -> @0",
                0.,
                (440f64 / 12.).sqrt(),
                -10.,
                10.,
            ),
        ] {
            let request = aten_samples::parse(line);
            let lowered = lower(&request);
            assert!(lowered.random);
            let draw = |seed: u64, offset: u64| {
                let state = [seed, offset].map(u64::to_ne_bytes).concat();
                let parameters = [
                    (ElementType::F32, vec![COUNT as i64], vec![0; 4 * COUNT]),
                    (ElementType::U64, vec![2], state),
                ];
                let results = run(&executor, &lowered, &parameters).unwrap();
                pjrt_support::floats(&results[0])
            };
            let values = draw(1, 0);
            assert_eq!(values, draw(1, 0), "{line}");
            assert_ne!(values, draw(2, 0), "{line}");
            assert_ne!(values, draw(1, COUNT as u64), "{line}");
            let numbers = values.iter().map(|&value| f64::from(value));
            let found = numbers.clone().sum::<f64>() / COUNT as f64;
            let square = numbers
                .clone()
                .map(|value| (value - found).powi(2))
                .sum::<f64>();
            let spread = (square / COUNT as f64).sqrt();
            // Five standard errors of each.
            let error = 5. * deviation / (COUNT as f64).sqrt();
            assert!((found - mean).abs() < error, "{line}: mean {found}");
            assert!(
                (spread - deviation).abs() < 2. * error,
                "{line}: deviation {spread}"
            );
            assert!(
                numbers
                    .clone()
                    .all(|value| (least..=greatest).contains(&value)),
                "{line}"
            );
        }
    }
}

#[test]
fn bad_requests_are_errors() {
    let tensor = |view| Argument::Tensor(operand(ElementType::F32, 0, view));
    let whole = View::contiguous(&[2, 3]);
    let good = || Request {
        operator: "sum.dim_IntList",
        arguments: vec![
            tensor(whole.clone()),
            Argument::Ints(vec![1]),
            Argument::Bool(false),
            Argument::None,
        ],
        storages: vec![storage(ElementType::F32, &[2, 3])],
        results: vec![new(ElementType::F32, View::contiguous(&[2]))],
    };
    assert!(matches!(aten::lower(&good()), Some(Ok(_))));
    let unknown = Request {
        operator: "frobnicate",
        ..good()
    };
    assert!(aten::lower(&unknown).is_none());

    type Spoil = fn(&mut Request<'_>);
    let cases: &[(&str, Spoil)] = &[
        ("argument 0: expected a tensor", |request| {
            request.arguments[0] = Argument::Int(3)
        }),
        ("argument 1: expected a dimension", |request| {
            request.arguments[1] = Argument::Ints(vec![2]);
        }),
        ("expected an index into the storages", |request| {
            request.storages.clear()
        }),
        ("expected one within 24 bytes", |request| {
            request.arguments[0] =
                Argument::Tensor(operand(ElementType::F32, 0, view(&[2, 3], &[4, 1], 0)));
        }),
        ("expected as many strides as sizes", |request| {
            request.arguments[0] =
                Argument::Tensor(operand(ElementType::F32, 0, view(&[2, 3], &[1], 0)));
        }),
        ("none negative", |request| {
            request.arguments[0] =
                Argument::Tensor(operand(ElementType::F32, 0, view(&[2, 3], &[-3, 1], 3)));
        }),
        ("expected a buffer of the storage's size", |request| {
            request.storages[0].dims = vec![2, 2]
        }),
        ("result 0: expected 2 elements", |request| {
            request.results = vec![new(ElementType::F32, View::contiguous(&[3]))];
        }),
        ("results: expected 1 of them", |request| {
            request.results.push(None)
        }),
        ("expected a dense new tensor", |request| {
            request.results = vec![new(ElementType::F32, view(&[2], &[2], 0))];
        }),
        ("expected a view without overlap", |request| {
            request.results = vec![into(ElementType::F32, 0, view(&[2], &[0], 0))];
        }),
        ("run-time scalars: expected one with index 0", |request| {
            request.arguments[3] = Argument::Scalar(Scalar::Runtime {
                index: 1,
                kind: Kind::Int,
            });
        }),
    ];
    for (expected, spoil) in cases {
        let mut request = good();
        spoil(&mut request);
        match aten::lower(&request) {
            Some(Err(error @ Error::Malformed { .. })) => {
                let text = error.to_string();
                assert!(
                    text.contains(expected),
                    "{text:?} does not say {expected:?}"
                );
            }
            other => panic!("{expected}: {other:?}"),
        }
    }

    // An exponent has to be known, and complex numbers have no order.
    let number = Argument::Scalar(Scalar::Constant(Number::Float(2.)));
    assert_eq!(
        aten::operators()
            .find(|row| row.name == "pow.Tensor_Scalar")
            .unwrap()
            .constants,
        [1]
    );
    let mut power = good();
    power.operator = "pow.Tensor_Scalar";
    power.arguments = vec![tensor(whole.clone()), number];
    power.results = vec![new(ElementType::F32, whole.clone())];
    assert!(matches!(aten::lower(&power), Some(Ok(_))));
    power.arguments[1] = Argument::Scalar(Scalar::Runtime {
        index: 0,
        kind: Kind::Float,
    });
    assert!(matches!(
        aten::lower(&power),
        Some(Err(Error::Malformed { .. }))
    ));
    let sort = aten_samples::parse("sort c64[4] n0 b0 -> c64[4] i64[4]");
    assert!(matches!(
        aten::lower(&sort),
        Some(Err(Error::Unsupported { .. }))
    ));
}

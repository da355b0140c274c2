//! The verifier refuses what is wrong: hand-made faults, and every small change to right plans.

use tpu_dist_collectives::Kind;
use tpu_dist_collectives::algorithm::*;
use tpu_dist_collectives::schedule::verify::{Hazard, verify};
use tpu_dist_collectives::schedule::{Buffer, Chunk, IN_FLIGHT, Request, Schedule, Step};

fn request(kind: Kind, ranks: u32, count: u64) -> Request {
    Request {
        kind,
        ranks,
        root: 0,
        counts: vec![count],
        element_size: 4,
        max_message: 2,
    }
}

fn output(offset: u64, count: u64) -> Chunk {
    Chunk::new(Buffer::Output, offset..offset + count)
}

fn scratch(offset: u64, count: u64) -> Chunk {
    Chunk::new(Buffer::Scratch, offset..offset + count)
}

fn send(to: u32, chunk: Chunk) -> Step {
    Step::Send { to, chunk }
}

fn recv(from: u32, chunk: Chunk) -> Step {
    Step::Recv { from, chunk }
}

fn recv_reduce(from: u32, chunk: Chunk) -> Step {
    Step::RecvReduce { from, chunk }
}

fn finish(chunk: Chunk) -> Step {
    Step::Finish { chunk }
}

fn schedule(steps: Vec<Vec<Step>>) -> Schedule {
    Schedule {
        algorithm: "test",
        scratch: vec![4; steps.len()],
        steps,
    }
}

/// Two ranks, four elements: both send all and reduce all.
fn exchange() -> Vec<Vec<Step>> {
    (0..2)
        .map(|rank| {
            vec![
                send(1 - rank, output(0, 4)),
                recv_reduce(1 - rank, output(0, 4)),
                finish(output(0, 4)),
            ]
        })
        .collect()
}

#[test]
fn faults_are_named() {
    let all_reduce = request(Kind::AllReduce, 2, 4);
    let with = |change: &dyn Fn(&mut Vec<Vec<Step>>)| {
        let mut steps = exchange();
        change(&mut steps);
        schedule(steps)
    };
    let cases: Vec<(Request, Schedule, &str)> = vec![
        (
            all_reduce.clone(),
            with(&|steps| steps[0][0] = send(0, output(0, 4))),
            "rank 0, step 0: peer 0 is not another rank",
        ),
        (
            all_reduce.clone(),
            with(&|steps| steps[0][0] = send(2, output(0, 4))),
            "peer 2 is not another rank",
        ),
        (
            all_reduce.clone(),
            with(&|steps| steps[1][0] = send(0, output(1, 4))),
            "rank 1, step 0: output[1..5] reaches past 4 elements",
        ),
        (
            all_reduce.clone(),
            with(&|steps| {
                steps[1][0] = send(
                    0,
                    Chunk {
                        offset: u64::MAX,
                        ..output(0, 4)
                    },
                )
            }),
            "reaches past 4 elements",
        ),
        (
            all_reduce.clone(),
            with(&|steps| steps[1][0] = send(0, scratch(0, 4))),
            "rank 1, step 0: scratch[0..4] is undefined",
        ),
        (
            all_reduce.clone(),
            with(&|steps| steps[1][0] = send(0, output(0, 3))),
            "rank 1 sends 3 elements, 4 are expected",
        ),
        (
            all_reduce.clone(),
            with(&|steps| {
                steps[1].insert(1, send(0, output(0, 4)));
                steps[0].insert(2, recv_reduce(1, output(0, 4)));
            }),
            "rank 0, step 2: rank 1 would be reduced twice",
        ),
        (
            all_reduce.clone(),
            with(&|steps| steps[1].insert(1, send(0, output(0, 4)))),
            "1 messages from rank 1 to rank 0 are never received",
        ),
        (
            all_reduce.clone(),
            with(&|steps| {
                steps[0].swap(0, 1);
                steps[1].swap(0, 1);
            }),
            "deadlock: rank 0 at step 0 (recv_reduce 1 output[0..4]), rank 1 at step 0",
        ),
        (
            all_reduce.clone(),
            with(&|steps| steps[0].truncate(2)),
            "rank 0, result output[0..4]: is not finished",
        ),
        (
            all_reduce.clone(),
            with(&|steps| steps[0].push(finish(output(0, 1)))),
            "rank 0, step 3: operates on a finished result",
        ),
        (
            all_reduce.clone(),
            with(&|steps| steps[0].insert(0, finish(output(0, 1)))),
            "rank 0, step 0: lacks rank 1",
        ),
        (
            all_reduce.clone(),
            with(&|steps| {
                let (dst, sources) = (output(0, 2), vec![output(0, 2), output(2, 2)]);
                steps[0].push(Step::Reduce { dst, sources });
            }),
            "operates on a finished result",
        ),
        (
            all_reduce.clone(),
            with(&|steps| {
                let (dst, sources) = (scratch(0, 2), vec![output(0, 2), output(2, 2)]);
                steps[0].insert(0, Step::Reduce { dst, sources });
            }),
            "reduces different elements (0 and 2 of the input)",
        ),
        (
            all_reduce.clone(),
            with(&|steps| {
                let (dst, sources) = (output(1, 2), vec![output(0, 2)]);
                steps[0].insert(0, Step::Reduce { dst, sources });
            }),
            "output[1..3] and output[0..2] overlap",
        ),
        (
            all_reduce.clone(),
            with(&|steps| {
                let (src, dst) = (output(0, 2), scratch(0, 3));
                steps[0].insert(0, Step::Copy { src, dst });
            }),
            "differ in count",
        ),
        (
            all_reduce.clone(),
            with(&|steps| {
                let (dst, sources) = (scratch(0, 2), vec![]);
                steps[0].insert(0, Step::Reduce { dst, sources });
            }),
            "reduces nothing",
        ),
        (
            all_reduce.clone(),
            with(&|steps| steps.truncate(1)),
            "schedule has steps for 1 and scratch for 1 ranks, request has 2",
        ),
        (
            Request {
                max_message: 0,
                ..all_reduce
            },
            with(&|_| {}),
            "max_message: expected at least 1",
        ),
        (
            request(Kind::Reduce, 2, 4),
            schedule(exchange()),
            "rank 1, step 1: output[0..4] is read only",
        ),
        (
            request(Kind::Broadcast, 2, 4),
            schedule(vec![vec![finish(output(0, 4))], vec![]]),
            "finishes in broadcast, which reduces nothing",
        ),
        (
            request(Kind::Broadcast, 2, 4),
            schedule(vec![
                vec![send(1, output(0, 4))],
                vec![recv(0, output(0, 4))],
            ]),
            "",
        ),
        (
            request(Kind::Broadcast, 2, 4),
            schedule(vec![
                vec![send(1, output(2, 2)), send(1, output(0, 2))],
                vec![recv(0, output(0, 2)), recv(0, output(2, 2))],
            ]),
            "rank 1, result output[0..2]: holds element 2 of rank 0, expected element 0 of rank 0",
        ),
        (
            request(Kind::Broadcast, 2, 4),
            schedule(vec![
                vec![send(1, output(0, 3))],
                vec![recv(0, output(0, 3))],
            ]),
            "rank 1, result output[3..4]: output[3..4] is undefined",
        ),
        (
            Request {
                counts: vec![],
                ..request(Kind::Barrier, 3, 0)
            },
            schedule(vec![
                vec![send(1, scratch(0, 0))],
                vec![recv(0, scratch(0, 0)), send(2, scratch(0, 0))],
                vec![recv(1, scratch(0, 0))],
            ]),
            "rank 0 may leave the barrier before rank 1 has entered",
        ),
    ];
    for (request, schedule, message) in cases {
        match verify(&request, &schedule, IN_FLIGHT) {
            Ok(_) => assert_eq!(message, "", "accepted\n{schedule}"),
            Err(error) => {
                let error = error.to_string();
                assert!(
                    !message.is_empty() && error.contains(message),
                    "{error:?} lacks {message:?}\n{schedule}"
                );
            }
        }
    }
}

#[test]
fn hazards_and_orders_are_reported() {
    let all_reduce = request(Kind::AllReduce, 2, 4);
    let report = verify(&all_reduce, &schedule(exchange()), 1).expect("right");
    assert!(report.bit_equal, "two operands commute");
    assert_eq!(
        (report.roundings, report.rounds, report.messages),
        (1, 1, 2)
    );
    assert_eq!((report.sent, report.received), (4, 4));
    let hazards = [0, 1].map(|rank| Hazard {
        rank,
        send: 0,
        write: 1,
    });
    assert_eq!(report.hazards, hazards);

    // Three ranks that add what comes in different orders.
    let steps = (0..3)
        .map(|rank: u32| {
            let others = [(rank + 1) % 3, (rank + 2) % 3];
            let mut steps: Vec<Step> = others.iter().map(|&to| send(to, output(0, 4))).collect();
            steps.extend(others.iter().map(|&from| recv_reduce(from, output(0, 4))));
            steps.push(finish(output(0, 4)));
            steps
        })
        .collect();
    let report = verify(&request(Kind::AllReduce, 3, 4), &schedule(steps), 1).expect("right");
    assert!(!report.bit_equal);
    assert_eq!(report.roundings, 2);
}

#[test]
fn too_few_buffers_deadlock() {
    // Both send two messages before they receive any.
    let steps = (0..2)
        .map(|rank| {
            vec![
                send(1 - rank, output(0, 2)),
                send(1 - rank, output(2, 2)),
                recv_reduce(1 - rank, output(0, 2)),
                recv_reduce(1 - rank, output(2, 2)),
                finish(output(0, 4)),
            ]
        })
        .collect();
    let (request, schedule) = (request(Kind::AllReduce, 2, 4), schedule(steps));
    assert!(verify(&request, &schedule, 2).is_ok());
    let error = verify(&request, &schedule, 1).expect_err("one buffer is too few");
    assert!(error.to_string().starts_with("deadlock"), "{error}");
}

/// Every plan without one of its steps, or with one of its chunks or peers changed, is wrong.
#[test]
fn every_step_matters() {
    let plans: Vec<(Box<dyn Algorithm>, Request)> = vec![
        (Box::new(Direct), request(Kind::AllReduce, 3, 7)),
        (Box::new(Direct), request(Kind::ReduceScatter, 3, 3)),
        (Box::new(Direct), request(Kind::AllToAll, 3, 3)),
        (Box::new(Direct), request(Kind::Gather, 3, 3)),
        (Box::new(Ring::new()), request(Kind::AllReduce, 4, 9)),
        (Box::new(Ring::new()), request(Kind::ReduceScatter, 4, 3)),
        (
            Box::new(Ring::bidirectional()),
            request(Kind::AllGather, 4, 3),
        ),
        (
            Box::new(Bucket::new([3, 2])),
            request(Kind::AllReduce, 6, 30),
        ),
        (Box::new(HalvingDoubling), request(Kind::AllReduce, 6, 9)),
        (Box::new(Swing::new()), request(Kind::AllReduce, 8, 9)),
        (Box::new(DoubleBinaryTree), request(Kind::AllReduce, 7, 9)),
        (Box::new(Binomial), request(Kind::Broadcast, 7, 9)),
        (Box::new(Pat), request(Kind::ReduceScatter, 7, 3)),
    ];
    for (algorithm, request) in plans {
        let good = plan(&*algorithm, &request).expect("supported");
        assert!(verify(&request, &good, IN_FLIGHT).is_ok());
        let changes: [fn(&mut Vec<Step>, usize); 3] = [
            |steps, at| {
                steps.remove(at);
            },
            |steps, at| shift(&mut steps[at]),
            |steps, at| redirect(&mut steps[at]),
        ];
        for rank in 0..good.steps.len() {
            for at in 0..good.steps[rank].len() {
                for (number, change) in changes.iter().enumerate() {
                    let mut bad = good.clone();
                    change(&mut bad.steps[rank], at);
                    if bad == good {
                        continue;
                    }
                    assert!(
                        verify(&request, &bad, IN_FLIGHT).is_err(),
                        "{} {}: change {number} of rank {rank}, step {at} was accepted\n{good}",
                        algorithm.name(),
                        request.kind,
                    );
                }
            }
        }
    }
}

fn shift(step: &mut Step) {
    match step {
        Step::Send { chunk, .. }
        | Step::Recv { chunk, .. }
        | Step::RecvReduce { chunk, .. }
        | Step::Reduce { dst: chunk, .. }
        | Step::Copy { dst: chunk, .. }
        | Step::Finish { chunk } => chunk.offset += 1,
    }
}

fn redirect(step: &mut Step) {
    match step {
        Step::Send { to: peer, .. }
        | Step::Recv { from: peer, .. }
        | Step::RecvReduce { from: peer, .. } => *peer = peer.checked_sub(1).unwrap_or(2),
        _ => {}
    }
}

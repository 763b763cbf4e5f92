//! Tests of one probe against each row of the table in spec 05 §1.3.

use super::*;
use ProbeResult::{Failure, Success};

const START: i64 = 1_000_000;

fn wall(second: i64) -> Timestamp {
    Timestamp::from_second(START + second).expect("in range")
}

/// `second` seconds after the agent's start, on both clocks.
fn at(second: u64) -> ClockReading {
    ClockReading { uptime: Duration::from_secs(second), wall: wall(second.try_into().expect("small")) }
}

fn probe(kind: ProbeKind, probe: serde_json::Value) -> ProbeStateMachine {
    let pace = ProbeTiming::of(&serde_json::from_value(probe).expect("a probe"));
    ProbeStateMachine::new(ProbeProperties { kind, pace, is_sidecar: false, agent_started: wall(0) })
}

fn plain(kind: ProbeKind) -> ProbeStateMachine {
    probe(kind, serde_json::json!({}))
}

fn with(state: InstanceState, is_started: bool) -> PodObservation {
    let instance = Some(Instance { id: "c-0".into(), state, is_started });
    PodObservation { is_over: false, is_deleting: false, instance }
}

fn running() -> PodObservation {
    with(InstanceState::Running(Some(wall(0))), true)
}

fn starting() -> PodObservation {
    with(InstanceState::Running(Some(wall(0))), false)
}

fn other(mut seen: PodObservation) -> PodObservation {
    seen.instance.as_mut().expect("an instance").id = "c-1".into();
    seen
}

fn next(turn: &mut ProbeStateMachine, seen: &PodObservation, second: u64) -> Next {
    turn.begin(Some(seen), at(second)).next
}

/// New results after each counted one: `S` and `F`, `.` where nothing changes.
fn counted_results(turn: &mut ProbeStateMachine, results: &str) -> String {
    let one = |c: char| match turn.count(if c == 'S' { Success } else { Failure }) {
        Some(Success) => 'S',
        Some(Failure) => 'F',
        None => '.',
    };
    results.chars().map(one).collect()
}

#[test]
fn rows_1_to_3_nothing_to_ask() {
    for kind in ProbeKind::ALL {
        let mut turn = plain(kind);
        assert_eq!(turn.begin(None, at(1)), ProbeStep::of(Next::Wait), "row 1");
        let over = PodObservation { is_over: true, ..running() };
        assert_eq!(turn.begin(Some(&over), at(1)), ProbeStep::of(Next::Stop), "row 2");
        let empty = PodObservation { instance: None, ..running() };
        assert_eq!(turn.begin(Some(&empty), at(1)), ProbeStep::of(Next::Wait), "row 3");
    }
}

#[test]
fn row_4_each_instance_begins_again() {
    for (kind, seed) in
        [(ProbeKind::Readiness, Some(Failure)), (ProbeKind::Liveness, Some(Success)), (ProbeKind::Startup, None)]
    {
        let mut turn = plain(kind);
        let first = turn.begin(Some(&running()), at(1));
        assert_eq!((first.forget, first.seed), (None, seed), "{kind:?}");
        let again = turn.begin(Some(&running()), at(2));
        assert_eq!((again.forget, again.seed), (None, None), "{kind:?}");
        let second = turn.begin(Some(&other(running())), at(3));
        assert_eq!((second.forget, second.seed), (Some("c-0".into()), seed), "{kind:?}");
    }
}

#[test]
fn results_of_one_instance_do_not_count_for_the_next() {
    let mut turn = probe(ProbeKind::Readiness, serde_json::json!({"successThreshold": 3}));
    turn.begin(Some(&running()), at(1));
    assert_eq!(counted_results(&mut turn, "SS"), "..");
    turn.begin(Some(&other(running())), at(2));
    assert_eq!(counted_results(&mut turn, "SSS"), "..S");
}

#[test]
fn row_5_on_hold_until_another_instance() {
    let mut turn = plain(ProbeKind::Liveness);
    assert_eq!(next(&mut turn, &running(), 1), Next::Probe);
    assert_eq!(counted_results(&mut turn, "FFF"), "..F");
    assert_eq!(next(&mut turn, &running(), 11), Next::Wait);
    assert_eq!(
        turn.begin(Some(&with(InstanceState::WillRestart, true)), at(12)),
        ProbeStep::of(Next::Wait),
        "row 5 before row 6"
    );
    assert_eq!(next(&mut turn, &other(running()), 21), Next::Probe);
    assert_eq!(counted_results(&mut turn, "FFF"), "..F", "counted from the beginning");
}

#[test]
fn row_6_what_does_not_run_has_failed() {
    for kind in ProbeKind::ALL {
        for (state, expected) in [
            (InstanceState::Waiting, Next::Wait),
            (InstanceState::WillRestart, Next::Wait),
            (InstanceState::Ended, Next::Stop),
        ] {
            let step = plain(kind).begin(Some(&with(state, false)), at(1));
            assert_eq!((step.set, step.next), (Some(Failure), expected), "{kind:?} {state:?}");
        }
    }
}

#[test]
fn row_7_ac_05_12_a_pod_that_is_deleted_is_only_asked_whether_it_is_ready() {
    let deleted = |seen: PodObservation| PodObservation { is_deleting: true, ..seen };
    for (kind, seen) in [(ProbeKind::Liveness, running()), (ProbeKind::Startup, starting())] {
        let step = plain(kind).begin(Some(&deleted(seen)), at(1));
        assert_eq!((step.set, step.next), (Some(Success), Next::Stop), "{kind:?}");
    }
    assert_eq!(next(&mut plain(ProbeKind::Readiness), &deleted(running()), 1), Next::Probe);
}

#[test]
fn row_8_the_initial_delay_is_of_whole_seconds_and_of_no_clock_that_is_set() {
    let new = || probe(ProbeKind::Liveness, serde_json::json!({"initialDelaySeconds": 5}));
    for (second, expected) in [(4, Next::Wait), (5, Next::Probe)] {
        assert_eq!(next(&mut new(), &running(), second), expected, "{second}");
    }
    let almost = ClockReading { uptime: Duration::from_millis(4999), wall: wall(4) };
    assert_eq!(new().begin(Some(&running()), almost).next, Next::Wait);
    // the wall clock is set back, or far ahead, after the container was first observed
    for jump in [-7200, 7200] {
        let mut turn = new();
        let jumped = |second: u64| ClockReading { uptime: Duration::from_secs(second), wall: wall(jump) };
        assert_eq!(next(&mut turn, &running(), 1), Next::Wait, "{jump}");
        assert_eq!(turn.begin(Some(&running()), jumped(4)).next, Next::Wait, "{jump}");
        assert_eq!(turn.begin(Some(&running()), jumped(5)).next, Next::Probe, "{jump}");
    }
    // the wall clock was set back before: the start of the container is in the future
    let mut turn = new();
    let future = with(InstanceState::Running(Some(wall(3600))), true);
    assert_eq!(next(&mut turn, &future, 1), Next::Wait);
    assert_eq!(next(&mut turn, &future, 6), Next::Probe);
    assert_eq!(next(&mut plain(ProbeKind::Liveness), &with(InstanceState::Running(None), true), 0), Next::Probe);
}

#[test]
fn rows_9_and_10_ac_05_7_startup_comes_first() {
    for (kind, seen, expected) in [
        (ProbeKind::Startup, starting(), Next::Probe),
        (ProbeKind::Startup, running(), Next::Wait),
        (ProbeKind::Liveness, starting(), Next::Wait),
        (ProbeKind::Readiness, starting(), Next::Wait),
        (ProbeKind::Liveness, running(), Next::Probe),
        (ProbeKind::Readiness, running(), Next::Probe),
    ] {
        assert_eq!(next(&mut plain(kind), &seen, 1), expected, "{kind:?}");
    }
}

#[test]
fn rows_12_to_14_thresholds() {
    for (case, kind, value, results, expected) in [
        ("AC-05-6", ProbeKind::Readiness, serde_json::json!({}), "SSFFFS", "SS..FS"),
        (
            "successes in a row",
            ProbeKind::Readiness,
            serde_json::json!({"successThreshold": 2}),
            "SFSSFSFS",
            "...S....",
        ),
        ("failures in a row", ProbeKind::Liveness, serde_json::json!({"failureThreshold": 2}), "FSFSFF", ".S.S.F"),
        ("AC-05-8", ProbeKind::Startup, serde_json::json!({"failureThreshold": 4}), "FFFF", "...F"),
        ("at once", ProbeKind::Startup, serde_json::json!({}), "S", "S"),
    ] {
        assert_eq!(counted_results(&mut probe(kind, value), results), expected, "{case}");
    }
}

#[test]
fn a_startup_probe_that_passed_asks_no_more() {
    let mut turn = plain(ProbeKind::Startup);
    assert_eq!(next(&mut turn, &starting(), 1), Next::Probe);
    assert_eq!(counted_results(&mut turn, "S"), "S");
    // the status may not show that yet
    assert_eq!(next(&mut turn, &starting(), 11), Next::Wait);
}

#[test]
fn ac_05_11_what_an_earlier_agent_started_is_not_seeded() {
    let older = |age: i64, is_started| with(InstanceState::Running(Some(wall(-age))), is_started);
    for kind in ProbeKind::ALL {
        assert_eq!(plain(kind).begin(Some(&older(11, true)), at(1)).seed, None, "{kind:?}");
    }
    assert_eq!(plain(ProbeKind::Readiness).begin(Some(&older(10, true)), at(1)).seed, Some(Failure), "just about ours");
    let mut sidecar = plain(ProbeKind::Startup);
    sidecar.fixed.is_sidecar = true;
    assert_eq!(sidecar.clone().begin(Some(&older(11, false)), at(1)).seed, None);
    assert_eq!(sidecar.begin(Some(&older(11, true)), at(1)).seed, Some(Success));
}

#[test]
fn failures_of_the_first_second_do_not_count_and_are_tried_again_soon() {
    let ms = Duration::from_millis;
    for (case, age, expected) in [
        ("new", 0, &[(0, Some(100)), (100, Some(200)), (300, Some(400)), (700, Some(300)), (1000, None)][..]),
        ("attempts that take their time", 0, &[(0, Some(100)), (990, Some(10)), (1000, None), (1001, None)]),
        ("started in whole seconds", 1, &[(0, Some(100)), (1000, None)]),
        ("older", 2, &[(0, None), (100, None)]),
    ] {
        let mut turn = plain(ProbeKind::Readiness);
        assert_eq!(
            next(&mut turn, &with(InstanceState::Running(Some(wall(60 - age))), true), 60),
            Next::Probe,
            "{case}"
        );
        for (at, pause) in expected {
            let at = ms(60_000 + at);
            assert_eq!(turn.early_failure(at, at), pause.map(ms), "{case} {at:?}");
        }
    }
    let mut turn = plain(ProbeKind::Startup);
    assert_eq!(next(&mut turn, &starting(), 1), Next::Probe);
    assert!(turn.early_failure(ms(1000), ms(1000)).is_some());
    assert!(turn.early_failure(ms(1000), ms(2500)).is_some_and(|pause| pause.is_zero()), "it took longer than that");
}

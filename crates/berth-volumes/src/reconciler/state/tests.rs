//! Operation scheduling, and a property test that no failure leaks a mount or stage.

use std::{collections::BTreeSet, time::Duration};

use proptest::prelude::*;

use super::*;

fn around(is_reported: bool, attachment: Attachment) -> ExternalState {
    ExternalState { is_reported, attachment }
}

fn here() -> ExternalState {
    around(true, Attachment::At(String::new()))
}

fn pod(number: u8) -> PodUid {
    PodUid::from(format!("p{number}").as_str())
}

fn due(state: &VolumeState, around: &ExternalState) -> NextStep {
    state.due(around, &Backoffs::default(), Instant::now())
}

#[test]
fn a_volume_waits_until_it_is_attached_and_known_to_be_in_use() {
    let mut state = VolumeState::new(true, Mode::Filesystem);
    assert!(state.want(&pod(1)) && !state.want(&pod(1)));
    let at = || Attachment::At("/dev/x".to_owned());
    for (is_reported, attachment, expected) in [
        (false, at(), NextStep::Wait(None)),
        (true, Attachment::Unread, NextStep::Wait(None)),
        (true, Attachment::Absent, NextStep::Wait(None)),
        (true, at(), NextStep::Do(Op::Mount(pod(1)))),
    ] {
        assert_eq!(due(&state, &around(is_reported, attachment)), expected);
    }
    state.unwant(&pod(1));
    assert_eq!(due(&state, &here()), NextStep::Removed, "nothing of it was ever there");
}

/// AC-07-17, AC-07-18: the class of a failed stage, and whether it is undone.
#[test]
fn only_what_may_be_there_is_undone() {
    for (class, expected) in [
        (Class::Uncertain, NextStep::Do(Op::UnmountDevice)),
        (Class::Final, NextStep::Removed),
        (Class::Transient, NextStep::Removed),
    ] {
        let mut state = VolumeState::new(true, Mode::Filesystem);
        state.want(&pod(1));
        state.record_result(&StepResult::NotStaged(class));
        state.unwant(&pod(1));
        assert_eq!(due(&state, &here()), expected, "{class:?}");
    }
    let mut state = VolumeState::new(true, Mode::Filesystem);
    state.want(&pod(1));
    state.record_result(&StepResult::NotStaged(Class::Uncertain));
    state.record_result(&StepResult::NotStaged(Class::Final));
    state.unwant(&pod(1));
    assert_eq!(due(&state, &here()), NextStep::Removed, "the driver reports that it does not exist");
}

#[test]
fn what_goes_comes_before_what_comes() {
    let mut state = VolumeState::new(false, Mode::Filesystem);
    state.want(&pod(2));
    state.record_result(&StepResult::Staged);
    state.record_result(&StepResult::Published(pod(2)));
    state.unwant(&pod(2));
    state.want(&pod(1));
    assert_eq!(due(&state, &here()), NextStep::Do(Op::Unmount(pod(2))));
    assert_eq!(state.other_user(&pod(1)), Some(&pod(2)));
    state.record_result(&StepResult::Unpublished(pod(2)));
    assert_eq!(due(&state, &here()), NextStep::Do(Op::Mount(pod(1))));
    assert_eq!(state.other_user(&pod(1)), None);
}

/// AC-07-20, AC-07-21: volumes left by an earlier agent.
#[test]
fn a_volume_found_on_disk_stays_until_the_node_status_is_read() {
    let mut state = VolumeState::new(true, Mode::Filesystem);
    state.rebuilt(pod(1), true);
    let unread = around(false, Attachment::Unread);
    assert_eq!(due(&state, &unread), NextStep::Wait(None));
    let mut wanted = state.clone();
    wanted.want(&pod(1));
    assert_eq!(due(&wanted, &here()), NextStep::Do(Op::Mount(pod(1))));
    wanted.record_result(&StepResult::NotPublished(pod(1), Class::Final));
    assert_eq!(wanted.pods[&pod(1)].presence, MountPresence::Uncertain, "a final error does not unmake it");
    state.unwant(&pod(1));
    assert_eq!(due(&state, &unread), NextStep::Wait(None), "the node was not read");
    let detached = around(false, Attachment::Absent);
    assert_eq!(due(&state, &detached), NextStep::Do(Op::Unmount(pod(1))));
    state.record_result(&StepResult::Unpublished(pod(1)));
    assert_eq!(due(&state, &detached), NextStep::Do(Op::UnmountDevice));
    let mut unclear = state.clone();
    unclear.keep_stage();
    assert_eq!(due(&unclear, &detached), NextStep::Wait(None), "who else has it could not be read");
    state.record_result(&StepResult::Unstaged);
    assert_eq!(due(&state, &detached), NextStep::Removed);
}

#[test]
fn a_failed_republish_leaves_what_is_there() {
    // AC-07-19
    let mut state = VolumeState::new(false, Mode::Filesystem);
    state.want(&pod(1));
    state.record_result(&StepResult::Published(pod(1)));
    assert_eq!(due(&state, &here()), NextStep::Wait(None));
    if let Some(own) = state.pods.get_mut(&pod(1)) {
        own.needs_republish = true;
    }
    assert_eq!(due(&state, &here()), NextStep::Do(Op::Mount(pod(1))));
    for class in [Class::Final, Class::Uncertain, Class::Transient] {
        state.record_result(&StepResult::NotPublished(pod(1), class));
        assert!(state.is_mounted(&pod(1)), "{class:?}");
    }
}

#[test]
fn a_failed_operation_pauses_and_others_do_not() {
    let (now, mut backoffs) = (Instant::now(), Backoffs::default());
    let mut state = VolumeState::new(false, Mode::Filesystem);
    state.want(&pod(1));
    backoffs.failed(OpName::Mount, None, now);
    let again = now + Duration::from_millis(500);
    assert_eq!(state.due(&here(), &backoffs, now), NextStep::Wait(Some(again)));
    assert_eq!(state.due(&here(), &backoffs, again), NextStep::Do(Op::Mount(pod(1))));
    state.record_result(&StepResult::NotStaged(Class::Uncertain));
    state.unwant(&pod(1));
    // AC-07-34
    assert_eq!(state.due(&here(), &backoffs, now), NextStep::Do(Op::UnmountDevice));
}

#[test]
fn a_pod_that_fails_keeps_no_other_from_its_turn() {
    let mut state = VolumeState::new(false, Mode::Filesystem);
    for number in 1..4 {
        state.want(&pod(number));
    }
    let mut seen = Vec::new();
    for _ in 0..6 {
        let NextStep::Do(op) = due(&state, &here()) else { panic!("something is due") };
        state.tried(&op);
        state.record_result(&StepResult::NotPublished(op.pod().expect("a pod's").clone(), Class::Final));
        seen.push(op);
    }
    assert_eq!(seen, [1, 2, 3, 1, 2, 3].map(|number| Op::Mount(pod(number))));
}

#[test]
fn a_pod_of_another_label_waits_until_the_volume_is_mounted_again() {
    // Spec 07 §3.4 steps 1 and 2, §11.
    let label = |label: &str| Some(label.to_owned());
    let mut state = VolumeState::new(false, Mode::Filesystem);
    let mount = |state: &mut VolumeState, number: u8| {
        let op = Op::Mount(pod(number));
        assert_eq!(due(state, &here()), NextStep::Do(op.clone()), "{number}");
        state.tried(&op);
        state.record_result(&StepResult::Staged);
        state.record_result(&StepResult::Published(pod(number)));
    };
    let want = |state: &mut VolumeState, number: u8, own: Option<String>| {
        state.want(&pod(number));
        state.pods.get_mut(&pod(number)).expect("wanted").label = own;
    };
    want(&mut state, 1, label("a"));
    mount(&mut state, 1);
    assert_eq!(state.label, label("a"));
    want(&mut state, 2, label("b"));
    want(&mut state, 3, None);
    assert_eq!(due(&state, &here()), NextStep::Wait(None));
    assert!(state.is_hindered(&pod(2)) && state.is_hindered(&pod(3)) && !state.is_hindered(&pod(1)));
    want(&mut state, 4, label("a"));
    mount(&mut state, 4);
    // A pod keeps the volume that it has, whatever its label is now, and it is published again.
    state.pods.get_mut(&pod(1)).expect("there").label = label("c");
    state.pods.get_mut(&pod(1)).expect("there").needs_republish = true;
    assert!(!state.is_hindered(&pod(1)));
    mount(&mut state, 1);
    assert_eq!(state.label, label("a"));
    for number in [1, 4] {
        state.unwant(&pod(number));
        assert_eq!(due(&state, &here()), NextStep::Do(Op::Unmount(pod(number))));
        state.record_result(&StepResult::Unpublished(pod(number)));
    }
    assert!(!state.is_hindered(&pod(2)), "nobody has it");
    assert_eq!(due(&state, &here()), NextStep::Do(Op::UnmountDevice), "staged with a label that no pod needs");
    state.record_result(&StepResult::Unstaged);
    mount(&mut state, 2);
    assert_eq!(state.label, label("b"));
    assert!(state.is_hindered(&pod(3)));
    // What may have been staged is unstaged before it is staged with another label.
    let mut unclear = VolumeState::new(false, Mode::Filesystem);
    want(&mut unclear, 1, label("a"));
    unclear.tried(&Op::Mount(pod(1)));
    unclear.record_result(&StepResult::NotStaged(Class::Uncertain));
    unclear.unwant(&pod(1));
    want(&mut unclear, 2, label("b"));
    assert_eq!(due(&unclear, &here()), NextStep::Do(Op::UnmountDevice));
}

#[test]
fn what_broke_off_is_undone() {
    let mut state = VolumeState::new(false, Mode::Filesystem);
    state.want(&pod(1));
    state.record_abort(&Op::Mount(pod(1)));
    assert!(!state.is_mounted(&pod(1)));
    state.unwant(&pod(1));
    assert_eq!(due(&state, &here()), NextStep::Do(Op::Unmount(pod(1))));
    state.record_abort(&Op::Unmount(pod(1)));
    assert_eq!(due(&state, &here()), NextStep::Do(Op::Unmount(pod(1))));
    state.record_result(&StepResult::Unpublished(pod(1)));
    state.record_abort(&Op::UnmountDevice);
    assert_eq!(due(&state, &here()), NextStep::Do(Op::UnmountDevice));
}

/// Actual state of the machine, as a driver knows it.
#[derive(Default)]
struct Machine {
    staged: bool,
    published: BTreeSet<PodUid>,
}

/// How a call ends: whether it did its work, and whether it reports that.
#[derive(Clone, Copy, Debug)]
enum End {
    Done,
    DoneButLost,
    LostBefore,
    Refused,
    NotTried,
}

fn ends() -> impl Strategy<Value = End> {
    prop_oneof![
        4 => Just(End::Done), 1 => Just(End::DoneButLost), 1 => Just(End::LostBefore),
        1 => Just(End::Refused), 1 => Just(End::NotTried)
    ]
}

impl End {
    fn is_done(self) -> bool {
        matches!(self, Self::Done | Self::DoneButLost)
    }

    fn class(self) -> Option<Class> {
        match self {
            Self::Done => None,
            Self::DoneButLost | Self::LostBefore => Some(Class::Uncertain),
            Self::Refused => Some(Class::Final),
            Self::NotTried => Some(Class::Transient),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Want(u8),
    /// With an SELinux label of its own.
    Label(u8),
    Unwant(u8),
    Stale(u8),
    Operate(End, End),
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0..3_u8).prop_map(Step::Want),
        1 => (0..3_u8).prop_map(Step::Label),
        2 => (0..3_u8).prop_map(Step::Unwant),
        1 => (0..3_u8).prop_map(Step::Stale),
        6 => (ends(), ends()).prop_map(|(one, other)| Step::Operate(one, other)),
    ]
}

/// The pod needs the volume with a label of its own, unless it has the volume.
fn label(state: &mut VolumeState, number: u8) {
    if let Some(own) = state.pods.get_mut(&pod(number)).filter(|own| own.presence == MountPresence::Absent) {
        own.label = Some(number.to_string());
    }
}

/// Runs the due operation as the owner does, with calls that end as given.
fn operate(state: &mut VolumeState, machine: &mut Machine, ends: (End, End)) -> NextStep {
    let due = due(state, &here());
    if let NextStep::Do(op) = &due {
        state.tried(op);
    }
    match &due {
        NextStep::Do(Op::Mount(pod)) => {
            if state.stage != MountPresence::Present {
                // A driver that rejects the call reports that nothing is staged.
                machine.staged =
                    if ends.0.is_done() { true } else { machine.staged && !matches!(ends.0, End::Refused) };
                match ends.0.class() {
                    None => state.record_result(&StepResult::Staged),
                    Some(class) => {
                        state.record_result(&StepResult::NotStaged(class));
                        return due;
                    }
                }
            }
            let had = state.is_mounted(pod);
            if ends.1.is_done() {
                machine.published.insert(pod.clone());
            } else if matches!(ends.1, End::Refused) && !had {
                machine.published.remove(pod);
            }
            match ends.1.class() {
                None => state.record_result(&StepResult::Published(pod.clone())),
                Some(class) => state.record_result(&StepResult::NotPublished(pod.clone(), class)),
            }
        }
        NextStep::Do(Op::Unmount(pod)) => {
            if ends.0.is_done() {
                machine.published.remove(pod);
            }
            let pod = pod.clone();
            state.record_result(&if ends.0.class().is_none() {
                StepResult::Unpublished(pod)
            } else {
                StepResult::NotUnpublished(pod)
            });
        }
        NextStep::Do(Op::UnmountDevice) => {
            assert!(machine.published.is_empty(), "unstaged while {:?} have it", machine.published);
            if ends.0.is_done() {
                machine.staged = false;
            }
            state.record_result(if ends.0.class().is_none() {
                &StepResult::Unstaged
            } else {
                &StepResult::NotUnstaged
            });
        }
        NextStep::Do(Op::Resize(_)) | NextStep::Wait(_) | NextStep::Removed => {}
    }
    due
}

proptest! {
    /// Whatever fails and whenever pods come and go: nothing present is forgotten, nothing is torn down under a pod,
    /// and in the end nothing is left.
    #[test]
    fn nothing_leaks(steps in proptest::collection::vec(steps(), 1..60)) {
        let (mut state, mut machine) = (VolumeState::new(true, Mode::Filesystem), Machine::default());
        for step in steps {
            match step {
                Step::Want(number) => {
                    state.want(&pod(number));
                }
                Step::Label(number) => label(&mut state, number),
                Step::Unwant(number) => state.unwant(&pod(number)),
                Step::Stale(number) => if let Some(own) = state.pods.get_mut(&pod(number)) {
                    own.needs_republish = own.presence == MountPresence::Present;
                },
                Step::Operate(one, other) => {
                    operate(&mut state, &mut machine, (one, other));
                }
            }
            for published in &machine.published {
                prop_assert!(state.pods.get(published).is_some_and(|own| own.presence != MountPresence::Absent));
            }
            prop_assert!(!machine.staged || state.stage != MountPresence::Absent);
            for (uid, own) in &state.pods {
                prop_assert!(own.presence != MountPresence::Present || machine.published.contains(uid));
            }
        }
        for number in 0..3 {
            state.unwant(&pod(number));
        }
        let settled = (0..20).any(|_| operate(&mut state, &mut machine, (End::Done, End::Done)) == NextStep::Removed);
        prop_assert!(settled, "{state:?}");
        prop_assert!(!machine.staged && machine.published.is_empty());
    }

    /// Every pod that needs the volume gets it once calls succeed.
    #[test]
    fn what_is_wanted_comes(steps in proptest::collection::vec(steps(), 0..40)) {
        let (mut state, mut machine) = (VolumeState::new(true, Mode::Filesystem), Machine::default());
        for step in steps {
            match step {
                Step::Want(number) => {
                    state.want(&pod(number));
                }
                Step::Unwant(number) => state.unwant(&pod(number)),
                // Pods with different labels have it one after the other.
                Step::Stale(_) | Step::Label(_) => {}
                Step::Operate(one, other) => {
                    operate(&mut state, &mut machine, (one, other));
                }
            }
        }
        for number in 0..3 {
            state.want(&pod(number));
        }
        for _ in 0..20 {
            operate(&mut state, &mut machine, (End::Done, End::Done));
        }
        prop_assert!((0..3).all(|number| state.is_mounted(&pod(number)) && machine.published.contains(&pod(number))));
    }
}

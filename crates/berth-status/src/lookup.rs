//! Small questions about container statuses and conditions. Pure.

use berth_types::api;

/// The state of a container status, of which the API allows one at a time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum State<'a> {
    /// Runs.
    Running,
    /// Has ended.
    Terminated(&'a api::ContainerStateTerminated),
    /// Waits.
    Waiting,
    /// Says nothing.
    None,
}

/// The state of a status.
pub fn state(status: &api::ContainerStatus) -> State<'_> {
    match &status.state {
        Some(api::ContainerState { running: Some(_), .. }) => State::Running,
        Some(api::ContainerState { terminated: Some(exit), .. }) => State::Terminated(exit),
        Some(api::ContainerState { waiting: Some(_), .. }) => State::Waiting,
        _ => State::None,
    }
}

/// Why a container waits (`CrashLoopBackOff`, …); `None` where it does not, or does not tell.
pub fn waiting_reason(status: &api::ContainerStatus) -> Option<&str> {
    status.state.as_ref()?.waiting.as_ref()?.reason.as_deref()
}

/// How the state ended, where it did.
pub fn exit(status: &api::ContainerStatus) -> Option<&api::ContainerStateTerminated> {
    status.state.as_ref()?.terminated.as_ref()
}

/// How the instance before ended (`lastState.terminated`).
pub fn last_exit(status: &api::ContainerStatus) -> Option<&api::ContainerStateTerminated> {
    status.last_state.as_ref()?.terminated.as_ref()
}

/// The status of that name.
pub fn find<'a>(list: &'a [api::ContainerStatus], name: &str) -> Option<&'a api::ContainerStatus> {
    list.iter().find(|s| s.name == name)
}

/// The condition of that type.
pub fn condition<'a>(status: &'a api::PodStatus, type_: &str) -> Option<&'a api::PodCondition> {
    status.conditions.iter().flatten().find(|c| c.type_ == type_)
}

/// Whether the condition of that type is `True`.
pub fn is_true(status: &api::PodStatus, type_: &str) -> bool {
    condition(status, type_).is_some_and(|c| c.status == "True")
}

/// A state that says how a container ended.
pub fn terminated(exit: api::ContainerStateTerminated) -> api::ContainerState {
    api::ContainerState { terminated: Some(exit), ..Default::default() }
}

/// A state that says why a container waits; empty texts are left out.
pub fn waiting(reason: &str, message: &str) -> api::ContainerState {
    let text = |t: &str| (!t.is_empty()).then(|| t.to_owned());
    let waiting = api::ContainerStateWaiting { reason: text(reason), message: text(message) };
    api::ContainerState { waiting: Some(waiting), ..Default::default() }
}

/// How a container ended of which nobody saw the end: exit code 137.
pub fn lost(reason: &str, message: &str) -> api::ContainerStateTerminated {
    api::ContainerStateTerminated {
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        exit_code: 137,
        ..Default::default()
    }
}

//! Accessors and constructors for container states and pod conditions. Pure.

use berth_types::api;

/// State of a container status; the API allows one at a time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ContainerStateRef<'a> {
    /// `running` is set.
    Running,
    /// `terminated` is set.
    Terminated(&'a api::ContainerStateTerminated),
    /// `waiting` is set.
    Waiting,
    /// No state is set.
    None,
}

/// State of a container status.
pub fn state(status: &api::ContainerStatus) -> ContainerStateRef<'_> {
    match &status.state {
        Some(api::ContainerState { running: Some(_), .. }) => ContainerStateRef::Running,
        Some(api::ContainerState { terminated: Some(exit), .. }) => ContainerStateRef::Terminated(exit),
        Some(api::ContainerState { waiting: Some(_), .. }) => ContainerStateRef::Waiting,
        _ => ContainerStateRef::None,
    }
}

/// Reason why a container waits (`CrashLoopBackOff`, …); `None` where it does not wait or has no reason.
pub fn waiting_reason(status: &api::ContainerStatus) -> Option<&str> {
    status.state.as_ref()?.waiting.as_ref()?.reason.as_deref()
}

/// `state.terminated`, if set.
pub fn exit(status: &api::ContainerStatus) -> Option<&api::ContainerStateTerminated> {
    status.state.as_ref()?.terminated.as_ref()
}

/// `lastState.terminated` of the previous instance, if set.
pub fn last_exit(status: &api::ContainerStatus) -> Option<&api::ContainerStateTerminated> {
    status.last_state.as_ref()?.terminated.as_ref()
}

/// Finds the status of a container by name.
pub fn find<'a>(list: &'a [api::ContainerStatus], name: &str) -> Option<&'a api::ContainerStatus> {
    list.iter().find(|s| s.name == name)
}

/// Finds a condition by type.
pub fn condition<'a>(status: &'a api::PodStatus, type_: &str) -> Option<&'a api::PodCondition> {
    status.conditions.iter().flatten().find(|c| c.type_ == type_)
}

/// Whether the condition of this type is `True`.
pub fn is_true(status: &api::PodStatus, type_: &str) -> bool {
    condition(status, type_).is_some_and(|c| c.status == "True")
}

/// Terminated state.
pub fn terminated(exit: api::ContainerStateTerminated) -> api::ContainerState {
    api::ContainerState { terminated: Some(exit), ..Default::default() }
}

/// Waiting state; empty texts are omitted.
pub fn waiting(reason: &str, message: &str) -> api::ContainerState {
    let text = |t: &str| (!t.is_empty()).then(|| t.to_owned());
    let waiting = api::ContainerStateWaiting { reason: text(reason), message: text(message) };
    api::ContainerState { waiting: Some(waiting), ..Default::default() }
}

/// Terminated state of a container whose end was not observed: exit code 137.
pub fn end_not_observed(reason: &str, message: &str) -> api::ContainerStateTerminated {
    api::ContainerStateTerminated {
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        exit_code: 137,
        ..Default::default()
    }
}

//! Selects the container instance for a log request. Pure.
//!
//! The first match wins; the texts are returned to the user as is (spec 03b §10).

use berth_types::{ContainerId, api};

/// There is no instance to read; the text is the response body.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct NoInstance(pub String);

/// The instance of `container` in `pod`, by its status; `is_previous` requests the previous one.
///
/// # Errors
/// The reason why there is none.
pub fn instance(
    pod: &str,
    container: &str,
    status: &api::PodStatus,
    is_previous: bool,
) -> Result<ContainerId, NoInstance> {
    let all = [&status.container_statuses, &status.init_container_statuses, &status.ephemeral_container_statuses];
    let found = all.into_iter().flatten().flatten().find(|s| s.name == container);
    let Some(found) = found else {
        return refuse(format!("container {container:?} in pod {pod:?} is not available"));
    };
    let last = found.last_state.as_ref().and_then(|s| s.terminated.as_ref());
    let last_id = last.and_then(|t| id(t.container_id.as_deref()));
    if is_previous {
        let text = || format!("previous terminated container {container:?} in pod {pod:?} not found");
        return last_id.ok_or_else(|| NoInstance(text()));
    }
    let is_over = || NoInstance(format!("container {container:?} in pod {pod:?} is terminated"));
    let state = found.state.as_ref();
    if state.is_some_and(|s| s.running.is_some()) {
        return id(found.container_id.as_deref()).ok_or_else(is_over);
    }
    if let Some(terminated) = state.and_then(|s| s.terminated.as_ref()) {
        return id(terminated.container_id.as_deref()).or(last_id).ok_or_else(is_over);
    }
    if last.is_some() {
        return last_id.ok_or_else(is_over);
    }
    let waits = format!("container {container:?} in pod {pod:?} is waiting to start");
    match state.and_then(|s| s.waiting.as_ref()).map(|w| w.reason.as_deref().unwrap_or_default()) {
        Some("ErrImagePull") => refuse(format!("{waits}: image can't be pulled")),
        Some("ImagePullBackOff") => refuse(format!("{waits}: trying and failing to pull image")),
        Some(reason) => refuse(format!("{waits}: {reason}")),
        None => refuse(format!("{waits} - no logs yet")),
    }
}

fn refuse(text: String) -> Result<ContainerId, NoInstance> {
    Err(NoInstance(text))
}

/// `containerd://abc` without its scheme; `None` without an ID.
fn id(text: Option<&str>) -> Option<ContainerId> {
    let text = text?;
    let id = text.split_once("://").map_or(text, |(_, id)| id);
    (!id.is_empty()).then(|| ContainerId::from(id))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn choose(state: Value, last: Value, is_previous: bool) -> Result<String, String> {
        let status = json!({"containerStatuses": [{
            "name": "c", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
            "containerID": "containerd://now", "state": state, "lastState": last,
        }]});
        let status = serde_json::from_value(status).expect("a status");
        instance("p", "c", &status, is_previous).map(|id| id.to_string()).map_err(|e| e.to_string())
    }

    #[test]
    fn the_first_match_wins() {
        let over = |id: &str| json!({"terminated": {"exitCode": 0, "containerID": id}});
        let waiting = |reason: &str| json!({"waiting": {"reason": reason}});
        for (name, state, last, is_previous, wanted) in [
            ("running", json!({"running": {}}), json!({}), false, Ok("now")),
            ("terminated", over("containerd://x"), json!({}), false, Ok("x")),
            ("terminated without id", over(""), over("containerd://y"), false, Ok("y")),
            ("terminated, none", over(""), json!({}), false, Err("container \"c\" in pod \"p\" is terminated")),
            ("between", waiting("CrashLoopBackOff"), over("containerd://y"), false, Ok("y")),
            ("previous", json!({"running": {}}), over("containerd://y"), true, Ok("y")),
            (
                "no previous",
                json!({"running": {}}),
                json!({}),
                true,
                Err("previous terminated container \"c\" in pod \"p\" not found"),
            ),
            (
                "pull",
                waiting("ErrImagePull"),
                json!({}),
                false,
                Err("container \"c\" in pod \"p\" is waiting to start: image can't be pulled"),
            ),
            (
                "pull again",
                waiting("ImagePullBackOff"),
                json!({}),
                false,
                Err("container \"c\" in pod \"p\" is waiting to start: trying and failing to pull image"),
            ),
            // AC-04-15
            (
                "creating",
                waiting("ContainerCreating"),
                json!({}),
                false,
                Err("container \"c\" in pod \"p\" is waiting to start: ContainerCreating"),
            ),
            (
                "nothing",
                json!({}),
                json!({}),
                false,
                Err("container \"c\" in pod \"p\" is waiting to start - no logs yet"),
            ),
        ] {
            let found = choose(state, last, is_previous);
            assert_eq!(found.as_deref().map_err(String::as_str), wanted, "{name}");
        }
        let none = instance("p", "x", &api::PodStatus::default(), false).map_err(|e| e.to_string());
        assert_eq!(none, Err("container \"x\" in pod \"p\" is not available".to_owned()));
    }
}

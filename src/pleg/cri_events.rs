//! Event source: the CRI event stream `GetContainerEvents`.
//!
//! containerd 1.6 returns `Unimplemented`, CRI-O with events disabled ends the stream at once, and
//! containerd 1.7 may lose events: they are hints only (spec 03b §7 "Runtime facts").

use std::sync::Arc;

use async_trait::async_trait;
use futures::StreamExt;

use super::{EventHints, Expect, Hint, HintError, HintStream};
use berth_cri::{CriError, RuntimeService};
use berth_proto::cri;
use berth_types::PodUid;

/// Source of CRI events.
pub struct CriEvents {
    cri: Arc<dyn RuntimeService>,
}

impl CriEvents {
    /// Creates the source for any CRI runtime.
    pub fn new(cri: Arc<dyn RuntimeService>) -> Self {
        Self { cri }
    }
}

#[async_trait]
impl EventHints for CriEvents {
    fn name(&self) -> &'static str {
        "cri"
    }

    async fn open(&self) -> Result<HintStream, HintError> {
        let events = self.cri.container_events().await.map_err(refusal)?;
        Ok(events.map(|event| event.map(hint).map_err(refusal)).boxed())
    }
}

fn refusal(error: CriError) -> HintError {
    if error.is_unimplemented() {
        HintError::Unsupported(error.to_string())
    } else {
        HintError::Broken(error.to_string())
    }
}

fn hint(event: cri::ContainerEventResponse) -> Hint {
    let expect = match cri::ContainerEventType::try_from(event.container_event_type) {
        Ok(cri::ContainerEventType::ContainerCreatedEvent | cri::ContainerEventType::ContainerStartedEvent) => {
            Expect::Started
        }
        Ok(cri::ContainerEventType::ContainerStoppedEvent) => Expect::Stopped,
        Ok(cri::ContainerEventType::ContainerDeletedEvent) => Expect::Gone,
        Err(_) => Expect::Anything,
    };
    let pod = event.pod_sandbox_status.and_then(|s| s.metadata).map(|m| m.uid).filter(|uid| !uid.is_empty());
    Hint {
        object: event.container_id,
        pod: pod.map(PodUid::from),
        expect,
        created_at: Some(event.created_at).filter(|at| *at > 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_become_hints() {
        let event = |kind: i32| cri::ContainerEventResponse {
            container_id: "c1".into(),
            container_event_type: kind,
            ..Default::default()
        };
        let expects: Vec<_> = (0..5).map(|kind| hint(event(kind)).expect).collect();
        assert_eq!(expects, [Expect::Started, Expect::Started, Expect::Stopped, Expect::Gone, Expect::Anything]);
        assert_eq!(hint(event(2)).pod, None, "an event without sandbox still is a hint");
    }
}

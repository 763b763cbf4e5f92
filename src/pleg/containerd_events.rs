//! Event source: containerd's native events service on the CRI socket.
//!
//! For runtimes named `containerd` without a CRI event stream (1.6). Only events of the CRI namespace
//! count, and only exits of a task's init process: exec probes cause hundreds of others.

use async_trait::async_trait;
use futures::StreamExt;
use prost::Message;
use tonic::{Code, Request, Status, metadata::MetadataValue, transport::Channel};

use super::{EventHints, Expect, Hint, HintError, HintStream};
use berth_proto::containerd_events::{ContainerHint, Envelope, SubscribeRequest, events_client::EventsClient};

const NAMESPACE: &str = "k8s.io";

/// Client of containerd's events service.
pub struct ContainerdEvents {
    channel: Channel,
}

impl ContainerdEvents {
    /// Creates the source from a channel to containerd's socket; the channel reconnects by itself.
    pub fn new(channel: Channel) -> Self {
        Self { channel }
    }
}

#[async_trait]
impl EventHints for ContainerdEvents {
    fn name(&self) -> &'static str {
        "containerd"
    }

    async fn open(&self) -> Result<HintStream, HintError> {
        let topic = |prefix: &str| format!("namespace==\"{NAMESPACE}\",topic~=\"^{prefix}\"");
        let mut request = Request::new(SubscribeRequest { filters: vec![topic("/tasks/"), topic("/containers/")] });
        request.metadata_mut().insert("containerd-namespace", MetadataValue::from_static(NAMESPACE));
        let reply = EventsClient::new(self.channel.clone()).subscribe(request).await.map_err(refusal)?;
        let hints = reply.into_inner().filter_map(|envelope| async move {
            match envelope {
                Ok(envelope) => hint(&envelope).map(Ok),
                Err(status) => Some(Err(refusal(status))),
            }
        });
        Ok(hints.boxed())
    }
}

fn refusal(status: Status) -> HintError {
    match status.code() {
        Code::Unimplemented => HintError::Unsupported(status.message().to_owned()),
        _ => HintError::Broken(status.to_string()),
    }
}

/// The first field of every task and container event; the other fields differ in type.
#[derive(Clone, PartialEq, Message)]
struct OnlyId {
    #[prost(string, tag = "1")]
    container_id: String,
}

/// Converts an event of a CRI container to a hint; `None` for irrelevant or malformed events.
pub fn hint(envelope: &Envelope) -> Option<Hint> {
    if envelope.namespace != NAMESPACE {
        return None;
    }
    let body = envelope.event.as_ref()?.value.as_slice();
    let (object, expect) = match envelope.topic.as_str() {
        "/tasks/exit" => {
            let exit = ContainerHint::decode(body).ok()?;
            if exit.id != exit.container_id {
                return None;
            }
            (exit.container_id, Expect::Stopping)
        }
        "/tasks/delete" => (OnlyId::decode(body).ok()?.container_id, Expect::Stopped),
        "/containers/create" | "/tasks/start" => (OnlyId::decode(body).ok()?.container_id, Expect::Started),
        "/containers/delete" => (OnlyId::decode(body).ok()?.container_id, Expect::Gone),
        _ => return None,
    };
    let made = envelope.timestamp.as_ref();
    let created_at = made.and_then(|t| t.seconds.checked_mul(1_000_000_000)?.checked_add(i64::from(t.nanos)));
    (!object.is_empty()).then_some(Hint { object, pod: None, expect, created_at })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn envelope(topic: &str, body: Vec<u8>) -> Envelope {
        Envelope {
            timestamp: Some(prost_types::Timestamp { seconds: 1, nanos: 5 }),
            namespace: NAMESPACE.into(),
            topic: topic.into(),
            event: Some(prost_types::Any { type_url: String::new(), value: body }),
        }
    }

    fn exit(container: &str, process: &str) -> Vec<u8> {
        ContainerHint { container_id: container.into(), id: process.into() }.encode_to_vec()
    }

    #[test]
    fn only_the_init_process_ends_a_container() {
        let found = hint(&envelope("/tasks/exit", exit("c1", "c1"))).expect("a hint");
        assert_eq!(
            (found.object.as_str(), found.expect, found.created_at),
            ("c1", Expect::Stopping, Some(1_000_000_005))
        );
        assert_eq!(hint(&envelope("/tasks/exit", exit("c1", "exec-7"))), None);
    }

    #[test]
    fn other_fields_may_have_any_type() {
        // TaskStart: container_id = 1, pid (a varint) = 2.
        let body = vec![0x0a, 2, b'c', b'1', 0x10, 0x2a];
        assert_eq!(hint(&envelope("/tasks/start", body)).map(|h| h.expect), Some(Expect::Started));
    }

    #[test]
    fn what_is_not_ours_or_malformed_is_passed_over() {
        assert_eq!(hint(&envelope("/images/create", exit("c1", "c1"))), None);
        assert_eq!(hint(&envelope("/tasks/exit", vec![0xff, 0xff])), None);
        assert_eq!(hint(&envelope("/containers/delete", Vec::new())), None);
        let other = Envelope { namespace: "moby".into(), ..envelope("/tasks/exit", exit("c1", "c1")) };
        assert_eq!(hint(&other), None);
    }
}

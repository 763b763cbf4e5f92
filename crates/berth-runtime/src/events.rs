//! Container event stream of CRI (`GetContainerEvents`): bounded queue per subscriber.
//!
//! Publishing never waits. A subscriber that falls behind is disconnected with an error: a closed stream makes a client
//! list again, a dropped event would not. Implements spec 09a §5.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use futures::stream::{self, BoxStream, StreamExt};
use tokio::sync::mpsc;
use tonic::Status;

use super::{cri_conversions, sandbox, sandbox::Sandbox};
use berth_proto::cri::ContainerEventResponse;

/// Capacity of a subscriber's queue, events.
const QUEUE: usize = 1000;

/// The subscribers.
#[derive(Debug, Default)]
pub struct EventBroadcaster(Mutex<Vec<Subscriber>>);

#[derive(Debug)]
struct Subscriber {
    queue: mpsc::Sender<ContainerEventResponse>,
    is_behind: Arc<AtomicBool>,
}

/// Event stream of one subscriber.
pub type Events = BoxStream<'static, Result<ContainerEventResponse, Status>>;

impl EventBroadcaster {
    /// Subscribes to future events.
    pub fn subscribe(&self) -> Events {
        let (queue, events) = mpsc::channel(QUEUE);
        let is_behind = Arc::new(AtomicBool::new(false));
        let subscriber = Subscriber { queue, is_behind: is_behind.clone() };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(subscriber);
        stream::unfold(Some((events, is_behind)), |state| async {
            let (mut events, is_behind) = state?;
            match events.recv().await {
                Some(event) => Some((Ok(event), Some((events, is_behind)))),
                None if is_behind.load(Ordering::Acquire) => {
                    let text = format!("event queue is full ({QUEUE} events): subscribe again and list containers");
                    Some((Err(Status::resource_exhausted(text)), None))
                }
                None => None,
            }
        })
        .boxed()
    }

    /// Publishes the events for the change from `old` to `new`.
    pub fn publish(&self, old: &Sandbox, new: &Sandbox, now_ns: i64) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|one| !one.queue.is_closed());
        if all.is_empty() {
            return;
        }
        let news = sandbox::events_between(old, new);
        if news.is_empty() {
            return;
        }
        let status = cri_conversions::sandbox_status(new);
        let containers = cri_conversions::container_statuses(new);
        for (id, kind) in news {
            let event = ContainerEventResponse {
                container_id: id,
                container_event_type: kind.into(),
                created_at: now_ns,
                pod_sandbox_status: Some(status.clone()),
                containers_statuses: containers.clone(),
            };
            all.retain(|one| match one.queue.try_send(event.clone()) {
                Ok(()) => true,
                Err(_) => {
                    one.is_behind.store(true, Ordering::Release);
                    false
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{container, sandbox};

    #[tokio::test]
    async fn a_slow_subscriber_gets_an_error_and_is_disconnected() {
        let hub = EventBroadcaster::default();
        let (slow, mut gone) = (hub.subscribe(), hub.subscribe());
        let (without, mut with) = (sandbox("s"), sandbox("s"));
        with.containers.insert("c".to_owned(), container("c"));
        hub.publish(&without, &with, 1);
        let first = gone.next().await.expect("an event").expect("no error");
        assert_eq!((first.container_id.as_str(), first.containers_statuses.len()), ("c", 1));
        drop(gone);
        for at in 0..QUEUE {
            hub.publish(&without, &with, i64::try_from(at).expect("small"));
        }
        let received: Vec<_> = slow.collect().await;
        assert_eq!(received.len(), QUEUE + 1);
        let last = received.last().expect("one").as_ref().expect_err("cut off");
        assert_eq!(last.code(), tonic::Code::ResourceExhausted);
        assert!(hub.0.lock().expect("whole").is_empty());
    }
}

//! containerd's event stream with arrival times: the clock of the benchmarks on containerd.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use berth_proto::containerd_events::{SubscribeRequest, events_client::EventsClient};
use futures::StreamExt;
use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::{net::UnixStream, sync::Notify};
use tokio_util::{sync::CancellationToken, sync::DropGuard};
use tonic::{Request, transport::Endpoint};

/// One containerd event.
#[derive(Debug, Clone)]
pub struct ContainerdEvent {
    /// Arrival time.
    pub at: Instant,
    /// Topic: `/tasks/start`, …
    pub topic: String,
    /// Id of the container or sandbox.
    pub id: String,
    /// Process id; only of `/tasks/start`.
    pub pid: u32,
}

/// Events since the last [`Events::clear`].
pub struct Events {
    seen: Arc<(Mutex<Vec<ContainerdEvent>>, Notify)>,
    _follower: DropGuard,
}

/// Fields that are read from events: `TaskStart` has both, other events only the first.
#[derive(Clone, PartialEq, Message)]
struct Body {
    #[prost(string, tag = "1")]
    id: String,
}

#[derive(Clone, PartialEq, Message)]
struct TaskStart {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(uint32, tag = "2")]
    pid: u32,
}

const TOPICS: [&str; 2] = ["/tasks/start", "/containers/delete"];

/// Opens a gRPC channel to a Unix socket.
pub async fn connect(socket: &Path) -> Result<tonic::transport::Channel> {
    let path: PathBuf = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
    });
    Ok(Endpoint::from_static("http://localhost").connect_with_connector(connector).await?)
}

impl Events {
    /// Subscribes to the events of a containerd until dropped.
    pub async fn follow(socket: &Path) -> Result<Self> {
        let filters = TOPICS.iter().map(|topic| format!("namespace==k8s.io,topic==\"{topic}\"")).collect();
        let mut client = EventsClient::new(connect(socket).await?);
        let stop = CancellationToken::new();
        let seen: Arc<(Mutex<Vec<ContainerdEvent>>, Notify)> = Arc::default();
        let (kept, stopped) = (seen.clone(), stop.clone());
        tokio::spawn(stopped.run_until_cancelled_owned(async move {
            // The response head arrives with the first event only.
            let Ok(reply) = client.subscribe(Request::new(SubscribeRequest { filters })).await else { return };
            let mut stream = reply.into_inner();
            while let Some(Ok(envelope)) = stream.next().await {
                let Some(body) = envelope.event else { continue };
                let (id, pid) = match envelope.topic.as_str() {
                    "/tasks/start" => TaskStart::decode(body.value.as_slice()).map(|e| (e.id, e.pid)),
                    _ => Body::decode(body.value.as_slice()).map(|e| (e.id, 0)),
                }
                .unwrap_or_default();
                let event = ContainerdEvent { at: Instant::now(), topic: envelope.topic, id, pid };
                kept.0.lock().unwrap_or_else(PoisonError::into_inner).push(event);
                kept.1.notify_waiters();
            }
        }));
        // containerd does not confirm when a subscription is active.
        tokio::time::sleep(Duration::from_millis(200)).await;
        Ok(Self { seen, _follower: stop.drop_guard() })
    }

    /// Discards the events so far.
    pub fn clear(&self) {
        self.seen.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Events so far.
    pub fn all(&self) -> Vec<ContainerdEvent> {
        self.seen.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits for events of a topic for that many distinct objects; returns the last of them.
    pub async fn until(&self, topic: &str, objects: usize, limit: Duration) -> Result<ContainerdEvent> {
        let wait = async {
            loop {
                let news = self.seen.1.notified();
                let mut ids = HashSet::new();
                let all = self.all();
                let mut of_topic = all.iter().filter(|e| e.topic == topic);
                if let Some(last) = of_topic.find(|e| ids.insert(e.id.clone()) && ids.len() == objects) {
                    return last.clone();
                }
                news.await;
            }
        };
        let found = tokio::time::timeout(limit, wait).await;
        let count = self.all().iter().filter(|e| e.topic == topic).count();
        let found =
            found.ok().with_context(|| format!("received {count} of {objects} {topic} events after {limit:?}"))?;
        ensure!(!found.id.is_empty(), "event {topic} without an ID");
        Ok(found)
    }
}

//! Deletes ResourceSlices of DRA drivers: all at the start of the agent, and those of a driver that is gone.
//!
//! Implements spec 06c §3.1, 10 §4.12 D2. Drivers that register again publish again; devices of the others must not be
//! scheduled.

use std::{sync::Arc, time::Duration};

use serde_json::Value;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use berth_api::{
    ReflectorStore,
    api::{ApiClient, Call, Resource, Verb},
};
use berth_sys::backoff::Backoff;
use berth_types::api;

/// Delays after failures.
const BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(300)).with_jitter(1.0, 1.2);
/// Maximum attempts.
const TRIES: u32 = 100;
/// Timeout of one request.
const DEADLINE: Duration = Duration::from_secs(30);

/// Deletes the ResourceSlices of the node, or those of one driver, once the node object exists.
pub async fn delete_resource_slices(
    api: Arc<dyn ApiClient>,
    nodes: ReflectorStore<api::Node>,
    name: String,
    driver: Option<String>,
    chance: Arc<dyn Fn() -> f64 + Send + Sync>,
    stop: CancellationToken,
) {
    let mut selector = format!("spec.nodeName={name}");
    if let Some(driver) = driver {
        selector.push_str(&format!(",spec.driver={driver}"));
    }
    tokio::select! {
        () = stop.cancelled() => {}
        () = try_to_wipe(api, nodes, &name, &selector, chance) => {}
    }
}

async fn try_to_wipe(
    api: Arc<dyn ApiClient>,
    mut nodes: ReflectorStore<api::Node>,
    name: &str,
    selector: &str,
    chance: Arc<dyn Fn() -> f64 + Send + Sync>,
) {
    while nodes.get("", name).is_none() {
        nodes.changed().await;
    }
    let mut backoff = BACKOFF;
    for _ in 0..TRIES {
        let call = Call::new(Verb::DeleteCollection, Resource::RESOURCE_SLICES, "", "")
            .query("fieldSelector", selector.to_owned())
            .within(DEADLINE);
        match api.call(call).await {
            Ok(answer) => {
                let removed = removed(&answer);
                if removed > 0 {
                    info!(node = name, count = removed, "Removed resource slices of a previous run");
                }
                return;
            }
            Err(err) if err.is_not_found() => return, // the server does not serve this resource
            Err(err) => {
                error!(node = name, %err, interval = ?backoff.peek(), "Failed to remove resource slices, will retry")
            }
        }
        sleep(backoff.next_with(chance())).await;
    }
}

/// Number of deleted objects in a response.
fn removed(answer: &[u8]) -> usize {
    let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
    answer.get("items").and_then(Value::as_array).map_or(0, Vec::len)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::{sync::watch, time::Instant};

    use super::*;
    use berth_api::{
        Snapshot,
        testing::{FakeApi, refused},
    };

    #[test]
    fn what_is_gone_is_counted() {
        for (answer, expected) in [("", 0), ("{}", 0), (r#"{"items": []}"#, 0), (r#"{"items": [{}, {}]}"#, 2)] {
            assert_eq!(removed(answer.as_bytes()), expected, "{answer}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn slices_of_one_driver_are_selected_by_its_name() {
        let mut snapshot = Snapshot::default();
        snapshot.objects.insert((String::new(), "n".to_owned()), Arc::default());
        let (_sender, receiver) = watch::channel(Arc::new(snapshot));
        let api = FakeApi::new(|_| Ok(json!({})));
        let nodes = ReflectorStore::new(receiver);
        let (driver, stop) = (Some("gpu.example.com".to_owned()), CancellationToken::new());
        delete_resource_slices(api.clone(), nodes, "n".to_owned(), driver, Arc::new(|| 0.0), stop).await;
        let selector = "spec.nodeName=n,spec.driver=gpu.example.com".to_owned();
        assert_eq!(api.calls()[0].query, [("fieldSelector", selector)]);
    }

    #[tokio::test(start_paused = true)]
    async fn slices_go_once_the_node_is_there() {
        let (sender, receiver) = watch::channel(Arc::<Snapshot<api::Node>>::default());
        let mut answers =
            vec![Ok(json!({})), Err(refused(500, "InternalError", "x")), Err(refused(403, "Forbidden", "x"))];
        let api = FakeApi::new(move |_| answers.pop().expect("three requests"));
        let wiping = tokio::spawn(delete_resource_slices(
            api.clone(),
            ReflectorStore::new(receiver),
            "n".to_owned(),
            None,
            Arc::new(|| 0.0),
            CancellationToken::new(),
        ));
        tokio::task::yield_now().await;
        assert_eq!(api.calls().len(), 0);
        let began = Instant::now();
        let mut snapshot = Snapshot::default();
        snapshot.objects.insert((String::new(), "n".to_owned()), Arc::default());
        sender.send_replace(Arc::new(snapshot));
        wiping.await.expect("it ends");
        assert_eq!((api.calls().len(), began.elapsed()), (3, Duration::from_secs(3)));
        assert_eq!(api.calls()[0].query, [("fieldSelector", "spec.nodeName=n".to_owned())]);
        assert_eq!(api.calls()[0].path(), "/apis/resource.k8s.io/v1/resourceslices");
    }
}

//! Waits for the node object while its registration is pending.

use std::time::Duration;

use tokio::{sync::watch, time::sleep};

use berth_api::ReflectorStore;
use berth_types::api;

/// Maximum wait for a pending registration.
const PATIENCE: Duration = Duration::from_secs(10);

/// Returns once the node exists, as reported by the watch or by its registration, or after a timeout: nobody may be
/// registering it.
pub(super) async fn wait_for_node(nodes: &ReflectorStore<api::Node>, name: &str, registered: &watch::Receiver<bool>) {
    let (mut registered, mut nodes) = (registered.clone(), nodes.clone());
    let shows_up = async {
        while nodes.get("", name).is_none() {
            nodes.changed().await;
        }
    };
    let is_made = async {
        if registered.wait_for(|made| *made).await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        () = sleep(PATIENCE) => {}
        () = shows_up => {}
        () = is_made => {}
    }
}

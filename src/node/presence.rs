//! Waits for the node object while somebody is about to make it.

use std::time::Duration;

use tokio::{sync::watch, time::sleep};

use berth_api::Store;
use berth_types::api;

/// How long a node that is about to be registered is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// Returns once the node is there, as the watch or its maker says, or when it has been waited for
/// long enough: nobody may be making it.
pub(super) async fn expected(nodes: &Store<api::Node>, name: &str, registered: &watch::Receiver<bool>) {
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

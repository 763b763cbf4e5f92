//! Local sockets of a running agent: permissions, and recovery after a crash.

use std::{
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::Path,
};

use berth_proto::{
    health::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient},
    pod_resources::{ListPodResourcesRequest, pod_resources_lister_client::PodResourcesListerClient},
    v1alpha1::{ListPodsRequest, pods_client::PodsClient},
};
use hyper_util::rt::TokioIo;
use nix::sys::signal::Signal;
use serde_json::json;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

use crate::agent::ScriptedServer;
use berth_testkit::process::{manifest, skips};

async fn connect(socket: &Path) -> Option<Channel> {
    let socket = socket.to_owned();
    let connector = tower::service_fn(move |_: http::Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost").connect_with_connector(connector).await.ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sockets_are_opened_guarded_and_opened_again() {
    if skips("sockets_are_opened_guarded_and_opened_again") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home().with(json!({"featureGates": {"PodsAPI": true}}));
    home.put_pod(&manifest("web"));
    let (resources, pods) =
        (home.root().join("pod-resources/kubelet.sock"), home.root().join("pods-api/pods-api.sock"));
    for round in 0..2 {
        let mut agent = home.start().await;
        agent.until_ready("web").await;
        for socket in [&resources, &pods] {
            agent.until("the socket answers", async || connect(socket).await.is_some()).await;
            assert!(socket.metadata().expect("there").file_type().is_socket());
            let folder = socket.parent().expect("a folder").metadata().expect("there");
            assert_eq!(folder.permissions().mode() & 0o777, 0o750, "root only");
        }
        let channel = connect(&resources).await.expect("it listens");
        let mut lister = PodResourcesListerClient::new(channel.clone());
        let list = lister.list(ListPodResourcesRequest {}).await.expect("answered").into_inner().pod_resources;
        assert_eq!(list.iter().map(|pod| pod.containers.len()).collect::<Vec<_>>(), [1], "round {round}");
        let health = HealthClient::new(channel).check(HealthCheckRequest { service: String::new() }).await;
        assert_eq!(health.expect("answered").into_inner().status(), ServingStatus::Serving);
        let mut all = PodsClient::new(connect(&pods).await.expect("it listens"));
        assert_eq!(all.list_pods(ListPodsRequest {}).await.expect("answered").into_inner().pods.len(), 1);
        // A crash leaves the sockets behind; a clean exit leaves no client waiting.
        let signal = if round == 0 { Signal::SIGKILL } else { Signal::SIGTERM };
        agent.end_with(signal).await;
        assert!(connect(&resources).await.is_none());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pods_api_is_behind_its_gate() {
    if skips("the_pods_api_is_behind_its_gate") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home();
    let agent = home.start().await;
    let resources = home.root().join("pod-resources/kubelet.sock");
    agent.until("the other socket answers", async || connect(&resources).await.is_some()).await;
    assert!(!home.root().join("pods-api").exists());
    assert_eq!(agent.stop().await, Some(0));
}

//! Port-forward proxy without TLS, in this process: the throughput of the streaming proxy alone.
//!
//! Client, proxy, and runtime share two threads. No listener of an agent serves streams without TLS.

use std::{convert::Infallible, net::SocketAddr, sync::Arc};

use anyhow::Result;
use async_trait::async_trait;
use axum::body::Body;
use berth::serving::runtime_tls;
use berth_metrics::{Registry, StreamingMetrics};
use berth_server::{
    port_forward,
    ports::streams::{Sandbox, StreamError, StreamProvider, StreamSet},
    routing::PodPath,
    streaming::{StreamingConfig, StreamingContext},
};
use berth_types::{ContainerId, Pod, SandboxId};
use http::Request;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::{net::TcpListener, task::AbortHandle};
use tokio_util::sync::CancellationToken;

use berth_testkit::pods;

/// A stream backend with one pod whose port-forward URL is fixed.
struct SinglePod {
    pod: Arc<Pod>,
    url: String,
}

#[async_trait]
impl StreamProvider for SinglePod {
    fn pod(&self, _: &str, _: &str) -> Option<Arc<Pod>> {
        Some(self.pod.clone())
    }
    async fn running(&self, _: &Pod, _: &str) -> Option<ContainerId> {
        None
    }
    async fn sandbox(&self, _: &Pod) -> Sandbox {
        Sandbox::Newest("sandbox".into())
    }
    async fn exec(&self, _: &ContainerId, _: Vec<String>, _: StreamSet) -> Result<String, StreamError> {
        Ok(self.url.clone())
    }
    async fn attach(&self, _: &ContainerId, _: StreamSet) -> Result<String, StreamError> {
        Ok(self.url.clone())
    }
    async fn port_forward(&self, _: &SandboxId, _: &[u16]) -> Result<String, StreamError> {
        Ok(self.url.clone())
    }
    async fn run(&self, _: &ContainerId, _: &[String]) -> Result<Vec<u8>, StreamError> {
        Ok(Vec::new())
    }
}

/// The listening streaming endpoint; stopped when dropped.
pub struct Proxy {
    /// Listen address.
    pub address: SocketAddr,
    task: AbortHandle,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Proxy {
    /// Starts the proxy in front of a streaming server at `url`.
    pub async fn start(url: &str) -> Result<Self> {
        let pod = pods::pod("web", json!({"containers": [{"name": "c"}]}));
        let streams = Arc::new(SinglePod { pod, url: format!("{url}/") });
        let metrics = StreamingMetrics::new(&Registry::new());
        let stop = CancellationToken::new();
        let streaming = StreamingContext::new(StreamingConfig::default(), streams, runtime_tls(), metrics, stop);
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let task = tokio::spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let streaming = streaming.clone();
                tokio::spawn(async move {
                    let service = service_fn(|request: Request<Incoming>| {
                        let streaming = streaming.clone();
                        async move {
                            let path = PodPath { namespace: "default".into(), pod: "web".into(), uid: None };
                            Ok::<_, Infallible>(port_forward(&streaming, &path, request.map(Body::new)).await)
                        }
                    });
                    let http = hyper::server::conn::http1::Builder::new();
                    let _ = http.serve_connection(TokioIo::new(tcp), service).with_upgrades().await;
                });
            }
        });
        Ok(Self { address, task: task.abort_handle() })
    }
}

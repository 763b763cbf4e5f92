//! Handler of `/checkpoint/{namespace}/{pod}/{container}` (spec 04 §5.5, §10).

use std::sync::Arc;

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::json;

use super::text::{coded, router_error};
use crate::{
    ports::{CheckpointError, Checkpoints, PodDirectory},
    routing::ContainerPath,
};
use berth_types::Pod;

/// `Retry-After` of a 429, in seconds.
const RETRY_AFTER: &str = "10";

/// Container identified by a request path.
#[derive(Clone, Copy, Debug)]
pub struct ContainerRef<'a> {
    /// Namespace of the pod.
    pub namespace: &'a str,
    /// Pod name.
    pub pod: &'a str,
    /// Container name, of any kind of container.
    pub container: &'a str,
}

impl<'a> ContainerRef<'a> {
    /// Converts a container path.
    pub fn of(path: &'a ContainerPath) -> Self {
        Self { namespace: &path.pod.namespace, pod: &path.pod.pod, container: &path.container }
    }
}

/// Handles a POST; `query` is percent-encoded.
pub async fn create(
    pods: &dyn PodDirectory,
    checkpoints: &dyn Checkpoints,
    which: ContainerRef<'_>,
    query: &str,
) -> Response {
    let ContainerRef { namespace, pod: name, container } = which;
    let Some(pod) = pods.find(namespace, name) else {
        return text(StatusCode::NOT_FOUND, "pod-not-found", "pod does not exist");
    };
    if !has(&pod, container) {
        return text(StatusCode::NOT_FOUND, "container-not-found", &format!("container {container} does not exist"));
    }
    let Ok(timeout) = timeout(query) else {
        return text(StatusCode::NOT_FOUND, "bad-timeout", "cannot parse value of timeout parameter");
    };
    match checkpoints.checkpoint(&pod, container, timeout).await {
        Ok(path) => {
            let body = json!({ "items": [path] }).to_string();
            ([(header::CONTENT_TYPE, "application/json")], body).into_response()
        }
        Err(error) => {
            let line = format!("checkpointing of {namespace}/{name}/{container} failed ({error})");
            if error != CheckpointError::Busy {
                return text(StatusCode::INTERNAL_SERVER_ERROR, "checkpoint-failed", &line);
            }
            let mut response = text(StatusCode::TOO_MANY_REQUESTS, "checkpoint-busy", &line);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER));
            response
        }
    }
}

fn has(pod: &Arc<Pod>, container: &str) -> bool {
    pod.container(container).is_some() || pod.ephemeral_containers().iter().any(|c| c.name == container)
}

/// Value of `timeout` in seconds; the last one wins.
fn timeout(query: &str) -> Result<Option<i64>, std::num::ParseIntError> {
    let last = form_urlencoded::parse(query.as_bytes()).filter(|(key, _)| key == "timeout").last();
    last.map(|(_, value)| value.parse()).transpose()
}

fn text(status: StatusCode, code: &'static str, body: &str) -> Response {
    coded(router_error(status, body), code)
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use http_body_util::BodyExt;

    use super::*;
    use berth_types::{PodUid, api};

    struct FakeNode(Arc<Vec<Arc<Pod>>>);

    impl PodDirectory for FakeNode {
        fn pods(&self) -> Arc<Vec<Arc<Pod>>> {
            self.0.clone()
        }

        fn is_active(&self, _pod: &Pod) -> bool {
            true
        }

        fn status(&self, _uid: &PodUid) -> Option<Arc<api::PodStatus>> {
            None
        }
    }

    #[async_trait]
    impl Checkpoints for FakeNode {
        async fn checkpoint(
            &self,
            _: &Arc<Pod>,
            container: &str,
            timeout: Option<i64>,
        ) -> Result<String, CheckpointError> {
            match container {
                "busy" => Err(CheckpointError::Busy),
                "bad" => Err(CheckpointError::Failed("not here".to_owned())),
                _ => Ok(format!("/c/{container}-{timeout:?}.tar")),
            }
        }
    }

    #[tokio::test]
    async fn checks_run_in_order_and_return_their_error() {
        let pod = json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"containers": [{"name": "main"}, {"name": "busy"}, {"name": "bad"}],
                     "initContainers": [{"name": "init"}], "ephemeralContainers": [{"name": "debug"}]},
        });
        let pod = Arc::new(Pod::new(serde_json::from_value(pod).expect("a pod")).expect("complete"));
        let node = FakeNode(Arc::new(vec![pod]));
        for (name, container, query, status, body) in [
            ("q", "main", "", 404, "pod does not exist"),
            // AC-03b-38
            ("p", "other", "timeout=x", 404, "container other does not exist"),
            ("p", "main", "timeout=x", 404, "cannot parse value of timeout parameter"),
            ("p", "main", "timeout=x&timeout=7", 200, "{\"items\":[\"/c/main-Some(7).tar\"]}"),
            ("p", "init", "", 200, "{\"items\":[\"/c/init-None.tar\"]}"),
            ("p", "debug", "", 200, "{\"items\":[\"/c/debug-None.tar\"]}"),
            ("p", "bad", "", 500, "checkpointing of n/p/bad failed (not here)"),
            ("p", "busy", "", 429, "checkpointing of n/p/busy failed (too many checkpoints in progress)"),
        ] {
            let which = ContainerRef { namespace: "n", pod: name, container };
            let response = create(&node, &node, which, query).await;
            assert_eq!(response.headers().contains_key("retry-after"), status == 429);
            assert_eq!(response.headers().contains_key("x-node-agent-error"), status != 200);
            let answered =
                (response.status().as_u16(), response.into_body().collect().await.expect("a body").to_bytes());
            assert_eq!(answered, (status, body.into()), "{name} {container} {query}");
        }
    }
}

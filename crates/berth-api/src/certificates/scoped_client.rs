//! API client scoped to one attempt: its background tasks stop when the last reference is dropped.
//!
//! The bootstrap credentials are reread for each attempt, so each attempt has a client of its own; without this, the
//! clients of a long outage would accumulate.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::api::{ApiClient, ApiError, Call, WatchStream};

struct ScopedClient {
    inner: Arc<dyn ApiClient>,
    _stop: DropGuard,
}

/// Returns a client that cancels `stop` when its last reference is dropped.
pub fn scoped_client(inner: Arc<dyn ApiClient>, stop: CancellationToken) -> Arc<dyn ApiClient> {
    Arc::new(ScopedClient { inner, _stop: stop.drop_guard() })
}

#[async_trait]
impl ApiClient for ScopedClient {
    async fn call(&self, call: Call) -> Result<Bytes, ApiError> {
        self.inner.call(call).await
    }

    async fn watch(&self, call: Call) -> Result<Box<dyn WatchStream>, ApiError> {
        self.inner.watch(call).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{api::Resource, testing::FakeApi};

    #[tokio::test]
    async fn it_ends_with_its_last_holder() {
        let (life, call) = (CancellationToken::new(), Call::get(Resource::HEALTHZ, "", ""));
        let stop = life.child_token();
        let client = scoped_client(FakeApi::new(|_| Ok(serde_json::json!("ok"))), stop.clone());
        let second = client.clone();
        assert!(client.call(call.clone()).await.is_ok());
        drop(client);
        assert!(!stop.is_cancelled() && second.call(call).await.is_ok(), "somebody holds it");
        drop(second);
        assert!(stop.is_cancelled() && !life.is_cancelled());
    }
}

//! Deserialization of API responses into typed objects.

use async_trait::async_trait;
use serde::de::DeserializeOwned;

use super::{ApiClient, ApiError, Call};

/// Parses a response body.
///
/// # Errors
/// The body is not JSON of the expected type.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(bytes).map_err(|error| ApiError::Malformed(format!("unexpected response: {error}")))
}

/// Typed calls of every [`ApiClient`].
#[async_trait]
pub trait TypedClient: ApiClient {
    /// Sends the request and parses the response.
    ///
    /// # Errors
    /// As [`ApiClient::call`], or the response is not of the expected type.
    async fn ask<T: DeserializeOwned + Send>(&self, call: Call) -> Result<T, ApiError> {
        parse(&self.call(call).await?)
    }
}

impl<C: ApiClient + ?Sized> TypedClient for C {}

//! Answers as objects.

use async_trait::async_trait;
use serde::de::DeserializeOwned;

use super::{ApiClient, ApiError, Call};

/// Parses an answer.
///
/// # Errors
/// It is not what was asked for.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(bytes).map_err(|error| ApiError::Malformed(format!("unexpected answer: {error}")))
}

/// Asks and parses.
#[async_trait]
pub trait Typed: ApiClient {
    /// Asks once and parses the answer.
    ///
    /// # Errors
    /// As [`ApiClient::call`], and an answer that is something else.
    async fn ask<T: DeserializeOwned + Send>(&self, call: Call) -> Result<T, ApiError> {
        parse(&self.call(call).await?)
    }
}

impl<C: ApiClient + ?Sized> Typed for C {}

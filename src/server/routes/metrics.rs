//! `/metrics`: the process-wide registry (spec 08 §1, §2).

use std::sync::Arc;

use axum::{
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};

use super::text::plain_error;
use crate::server::ports::Pages;

pub async fn scrape(State(pages): State<Arc<dyn Pages>>) -> Response {
    let page = match pages.metrics() {
        Ok(page) => page,
        Err(error) => {
            let text = format!("An error has occurred while serving metrics:\n\n{error}");
            return plain_error(StatusCode::INTERNAL_SERVER_ERROR, &text);
        }
    };
    let start = pages.process_start().to_string();
    let headers = [
        (header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8; escaping=underscores".to_owned()),
        (header::HeaderName::from_static("process-start-time-unix"), start),
    ];
    (headers, page).into_response()
}

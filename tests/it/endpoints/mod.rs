//! Server endpoints behind the router, on the real machine: log directory, journal, and pprof.

mod dashboards;
mod journal;
mod node_logs;
mod openapi;
mod profiles;

use axum::{
    body::Body,
    http::{Request, StatusCode},
    response::Response,
};
use http_body_util::BodyExt;

/// A GET request with headers.
fn get(uri: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let mut request = Request::get(uri);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Body::empty()).expect("a request")
}

/// Status and body of a response.
async fn status_and_body(response: Response) -> (u16, Vec<u8>) {
    let status: StatusCode = response.status();
    (status.as_u16(), response.into_body().collect().await.expect("a whole body").to_bytes().to_vec())
}

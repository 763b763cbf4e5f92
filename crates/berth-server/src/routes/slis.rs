//! Handler of `/metrics/slis`: health check SLI metrics (spec 04 §5.7, 08 §7).

use axum::{
    body::Body,
    http::{HeaderName, Method, Request, header},
    response::{IntoResponse, Response},
};

use berth_metrics::{
    SliMetrics,
    exposition::{ExpositionFormat, PROCESS_START_HEADER},
};

/// Handles any method; `DELETE` resets the metrics. `started` is the process start in Unix seconds.
pub fn serve(slis: &SliMetrics, started: u64, request: &Request<Body>) -> Response {
    if request.method() == Method::DELETE {
        slis.reset();
        return ([(header::CONTENT_TYPE, super::text::PLAIN)], "metrics reset\n").into_response();
    }
    let accept = request.headers().get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let format = ExpositionFormat::negotiate(accept);
    let mut page = Vec::new();
    format.encode(slis.registry().gather(), &mut page);
    let mut response = ([(header::CONTENT_TYPE, format.content_type())], page).into_response();
    if let Ok(name) = HeaderName::try_from(PROCESS_START_HEADER) {
        response.headers_mut().insert(name, started.into());
    }
    response
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    async fn ask(slis: &SliMetrics, method: &str) -> String {
        let request = Request::builder().method(method).body(Body::empty()).expect("a request");
        let response = serve(slis, 7, &request);
        assert_eq!(response.status(), 200);
        assert!(method == "DELETE" || response.headers()["process-start-time-unix"] == "7");
        let body = response.into_body().collect().await.expect("a body").to_bytes();
        String::from_utf8(body.to_vec()).expect("text")
    }

    #[tokio::test]
    async fn checks_are_counted_until_they_are_forgotten() {
        // AC-08-11
        let slis = SliMetrics::new(7.0);
        assert!(!ask(&slis, "GET").await.contains("kubernetes_healthcheck"), "no check has run yet");
        slis.checked("ping", true);
        slis.checked("syncloop", false);
        slis.checked("ping", true);
        let page = ask(&slis, "GET").await;
        for line in [
            "# HELP kubernetes_healthcheck [STABLE] ",
            "kubernetes_healthcheck{name=\"ping\",type=\"healthz\"} 1\n",
            "kubernetes_healthcheck{name=\"syncloop\",type=\"healthz\"} 0\n",
            "kubernetes_healthchecks_total{name=\"ping\",status=\"success\",type=\"healthz\"} 2\n",
            "kubernetes_healthchecks_total{name=\"syncloop\",status=\"error\",type=\"healthz\"} 1\n",
            "process_start_time_seconds 7\n",
        ] {
            assert!(page.contains(line), "{line} not in\n{page}");
        }
        assert_eq!(ask(&slis, "DELETE").await, "metrics reset\n");
        let page = ask(&slis, "GET").await;
        assert!(!page.contains("kubernetes_healthcheck") && page.contains("process_start_time_seconds"));
    }
}

//! Handlers of `/metrics/resource`, `/metrics/cadvisor`, and `/metrics/probes` (spec 04b §8-11).

use axum::{
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};

use super::{metrics::accepts_gzip, text::plain_error};
use crate::ports::{MetricsPage, Statistics};
use berth_metrics::exposition::{ExpositionFormat, PROCESS_START_HEADER, error_body};

/// Handles `/metrics/resource`.
pub async fn resource(statistics: &dyn Statistics, headers: &HeaderMap) -> Response {
    serve(statistics, MetricsPage::Resource, headers).await
}

/// Handles `/metrics/cadvisor`.
pub async fn cadvisor(statistics: &dyn Statistics, headers: &HeaderMap) -> Response {
    serve(statistics, MetricsPage::Cadvisor, headers).await
}

/// Handles `/metrics/probes`.
pub async fn probes(statistics: &dyn Statistics, headers: &HeaderMap) -> Response {
    serve(statistics, MetricsPage::Probes, headers).await
}

async fn serve(statistics: &dyn Statistics, page: MetricsPage, headers: &HeaderMap) -> Response {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let format = ExpositionFormat::negotiate(text(header::ACCEPT));
    let is_zipped = text(header::ACCEPT_ENCODING).is_some_and(accepts_gzip);
    let page = match statistics.metrics(page, format, is_zipped).await {
        Ok(page) => page,
        Err(error) => return plain_error(StatusCode::INTERNAL_SERVER_ERROR, error_body(&error).trim_end()),
    };
    let mut response = page.into_response();
    let all = response.headers_mut();
    if let Ok(kind) = HeaderValue::from_str(&format.content_type()) {
        all.insert(header::CONTENT_TYPE, kind);
    }
    if let Ok(name) = HeaderName::from_bytes(PROCESS_START_HEADER.as_bytes()) {
        all.insert(name, HeaderValue::from(statistics.process_start()));
    }
    if is_zipped {
        all.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    response
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use bytes::Bytes;
    use http_body_util::BodyExt;

    use super::*;
    use crate::ports::SummaryForm;

    struct Pages;

    #[async_trait]
    impl Statistics for Pages {
        async fn summary(&self, _: SummaryForm) -> Result<Bytes, String> {
            Err("not asked for here".to_owned())
        }

        async fn metrics(&self, page: MetricsPage, format: ExpositionFormat, is_zipped: bool) -> Result<Bytes, String> {
            match page {
                MetricsPage::Probes => Err("a gatherer's text".to_owned()),
                page => Ok(Bytes::from(format!("{page:?} {format:?} {is_zipped}"))),
            }
        }

        fn process_start(&self) -> u64 {
            1_700_000_000
        }
    }

    async fn ask(accept: &str, encoding: &str) -> (HeaderMap, String) {
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT, accept.parse().expect("a header"));
        headers.insert(header::ACCEPT_ENCODING, encoding.parse().expect("a header"));
        let response = resource(&Pages, &headers).await;
        let headers = response.headers().clone();
        let body = response.into_body().collect().await.expect("a body").to_bytes();
        (headers, String::from_utf8(body.to_vec()).expect("text"))
    }

    #[tokio::test]
    async fn a_scraper_gets_the_format_it_asks_for() {
        let (headers, body) = ask("*/*", "identity").await;
        assert_eq!(headers["content-type"], "text/plain; version=0.0.4; charset=utf-8; escaping=underscores");
        assert_eq!(headers["process-start-time-unix"], "1700000000");
        assert!(!headers.contains_key("content-encoding"));
        assert_eq!(body, "Resource Text(Underscores) false");
        let proto = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited";
        let (headers, body) = ask(proto, "deflate, gzip;q=0.5").await;
        assert_eq!(
            (headers["content-encoding"].as_bytes(), body.as_str()),
            (&b"gzip"[..], "Resource Delimited(Underscores) true")
        );
        assert_eq!(ask("*/*", "gzip;q=0, br").await.1, "Resource Text(Underscores) false");
    }

    #[tokio::test]
    async fn a_failed_page_returns_its_error() {
        let response = probes(&Pages, &HeaderMap::new()).await;
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let body = response.into_body().collect().await.expect("a body").to_bytes();
        assert_eq!(body, "An error has occurred while serving metrics:\n\na gatherer's text\n");
    }
}

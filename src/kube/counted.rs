//! Counts what is asked of the API server, whatever came of it: an attempt that is given up counts
//! as an error. Behaviour: spec 08 §4.15.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use futures::{FutureExt, future::BoxFuture};
use http::{Request, Response};
use http_body::Body as HttpBody;
use tokio::time::Instant;
use tower::{Layer, Service};

use crate::metrics::RestClientMetrics;

/// Puts the counting around a client's service.
#[derive(Clone)]
pub struct Counted {
    metrics: RestClientMetrics,
    host: Arc<str>,
}

impl Counted {
    /// `host` is the server's `host:port`.
    pub fn new(metrics: RestClientMetrics, host: &str) -> Self {
        Self { metrics, host: host.into() }
    }
}

impl<S> Layer<S> for Counted {
    type Service = CountedService<S>;

    fn layer(&self, inner: S) -> CountedService<S> {
        CountedService { inner, counted: self.clone() }
    }
}

/// A service whose requests are counted.
#[derive(Clone)]
pub struct CountedService<S> {
    inner: S,
    counted: Counted,
}

/// One request; counted when it is dropped.
struct Asked {
    counted: Counted,
    method: http::Method,
    began: Instant,
    status: Option<u16>,
}

impl Drop for Asked {
    fn drop(&mut self) {
        let Counted { metrics, host } = &self.counted;
        metrics.ended(host, self.method.as_str(), self.status, self.began.elapsed());
    }
}

impl<S, A, B> Service<Request<A>> for CountedService<S>
where
    S: Service<Request<A>, Response = Response<B>>,
    S::Future: Send + 'static,
    A: HttpBody,
    B: HttpBody,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<A>) -> Self::Future {
        let Counted { metrics, host } = &self.counted;
        let method = request.method().clone();
        if let Some(bytes) = request.body().size_hint().exact() {
            metrics.sent(host, method.as_str(), bytes);
        }
        let mut asked = Asked { counted: self.counted.clone(), method, began: Instant::now(), status: None };
        let answer = self.inner.call(request);
        async move {
            let answer = answer.await;
            if let Ok(response) = &answer {
                asked.status = Some(response.status().as_u16());
                if let Some(bytes) = response.body().size_hint().exact() {
                    asked.counted.metrics.received(&asked.counted.host, asked.method.as_str(), bytes);
                }
            }
            drop(asked);
            answer
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use tower::{ServiceExt, service_fn};

    use super::*;
    use crate::metrics::Registry;

    #[tokio::test(start_paused = true)]
    async fn what_is_given_up_is_an_error() {
        let registry = Registry::new();
        let counted = Counted::new(RestClientMetrics::new(&registry), "api:1");
        let service = counted.layer(service_fn(|request: Request<String>| async move {
            if request.uri().path() == "/hangs" {
                std::future::pending::<()>().await;
            }
            Ok::<_, Infallible>(Response::new("answer".to_owned()))
        }));
        let ask = |path: &str| {
            let request = Request::get(path).body("question".to_owned()).expect("a request");
            tokio::time::timeout(std::time::Duration::from_secs(1), service.clone().oneshot(request))
        };
        assert!(ask("/").await.is_ok());
        assert!(ask("/hangs").await.is_err());
        let families = registry.gather();
        let counts: Vec<(String, f64)> = families
            .iter()
            .filter(|family| family.name() == "rest_client_requests_total")
            .flat_map(|family| family.get_metric())
            .map(|m| (m.get_label()[0].value().to_owned(), m.get_counter().get_value()))
            .collect();
        assert_eq!(counts, [("200".to_owned(), 1.0), ("<error>".to_owned(), 1.0)]);
        let sum = |name: &str| {
            let family = families.iter().find(|family| family.name() == name).expect("there");
            family.get_metric()[0].get_histogram().get_sample_sum()
        };
        assert_eq!((sum("rest_client_request_size_bytes"), sum("rest_client_response_size_bytes")), (16.0, 6.0));
    }
}

//! Handler of `/flagz`: all flags and their values (spec 04 §5.7).

use std::collections::BTreeMap;

use axum::{http::HeaderMap, response::Response};
use serde_json::{Map, Value};

use super::zpages::{self, DELIMITERS, Form};

/// Handles any method. Secrets in `flags` are masked by the caller.
pub fn show(flags: &BTreeMap<String, String>, headers: &HeaderMap) -> Response {
    match zpages::form(headers, "Flagz") {
        None => zpages::not_acceptable(),
        Some(Form::Text) => {
            let delimiter = DELIMITERS[rand::random_range(0..DELIMITERS.len())];
            let lines: String = flags.iter().map(|(name, value)| format!("{name}{delimiter}{value}\n")).collect();
            zpages::text(format!("{}\n{lines}", zpages::heading("flagz")))
        }
        Some(Form::Object { encoding, version }) => {
            let list = flags.iter().map(|(name, value)| (name.clone(), Value::from(value.as_str()))).collect();
            let fields = Map::from_iter([("flags".to_owned(), Value::Object(list))]);
            zpages::object("Flagz", version, encoding, fields)
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::http::header;
    use http_body_util::BodyExt;

    use super::*;

    async fn body(response: Response) -> String {
        let bytes = response.into_body().collect().await.expect("a body").to_bytes();
        String::from_utf8(bytes.to_vec()).expect("text")
    }

    #[tokio::test]
    async fn flags_are_listed_for_people_and_machines() {
        let flags = BTreeMap::from([("v".to_owned(), "2".to_owned()), ("address".to_owned(), "0.0.0.0".to_owned())]);
        let text = body(show(&flags, &HeaderMap::new())).await;
        let beginning = "\nkubelet flagz\nWarning: This endpoint is not meant to be machine parseable, has no formatting \
                         compatibility guarantees and is for debugging purposes only.\n\naddress";
        assert!(text.starts_with(beginning), "{text}");
        assert!(text.ends_with("2\n"));

        let accept = |text: &'static str| HeaderMap::from_iter([(header::ACCEPT, text.parse().expect("a value"))]);
        let response = show(&flags, &accept("application/json;as=Flagz;v=v1alpha1;g=config.k8s.io"));
        assert!(response.headers().contains_key(header::WARNING));
        let object = "{\"kind\":\"Flagz\",\"apiVersion\":\"config.k8s.io/v1alpha1\",\"metadata\":{\"name\":\"kubelet\"},\
                      \"flags\":{\"address\":\"0.0.0.0\",\"v\":\"2\"}}\n";
        assert_eq!(body(response).await, object);
        let yaml = body(show(&flags, &accept("application/yaml;as=Flagz;v=v1beta1;g=config.k8s.io"))).await;
        assert_eq!(serde_saphyr::from_str::<Value>(&yaml).expect("YAML")["flags"]["address"], "0.0.0.0");
        let refused = show(&flags, &accept("application/json"));
        assert_eq!(refused.status(), 406);
        assert!(body(refused).await.contains("\"reason\":\"NotAcceptable\""));
    }
}

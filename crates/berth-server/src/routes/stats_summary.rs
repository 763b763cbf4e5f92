//! Handler of `/stats/summary`: resource usage of the node and its pods (spec 04b §7).

use axum::{
    body::{Body, to_bytes},
    http::{HeaderMap, Method, Request, StatusCode, header},
    response::{IntoResponse, Response},
};
use http_body_util::LengthLimitError;

use super::text::PLAIN;
use crate::ports::{Statistics, SummaryForm};

/// Maximum length of a form body, in bytes. kubelet reads 10 MiB; on the read-only port, any client could occupy that
/// memory for a single parameter.
const MAX_FORM: usize = 64 << 10;
/// Parameter that requests the short form.
const SHORT: &str = "only_cpu_and_memory";

/// Responds with the summary, or with an error.
pub async fn serve(statistics: &dyn Statistics, request: Request<Body>) -> Response {
    let form = match form(request).await {
        Ok(form) => form,
        Err(error) => return failed(&format!("parse form failed: {error}")),
    };
    match statistics.summary(form).await {
        Ok(page) => ([(header::CONTENT_TYPE, "application/json")], page).into_response(),
        Err(error) => failed(&error),
    }
}

fn failed(error: &str) -> Response {
    (StatusCode::INTERNAL_SERVER_ERROR, [(header::CONTENT_TYPE, PLAIN)], format!("Internal Error: {error}"))
        .into_response()
}

/// The short form needs exactly one value `true`, in query and body together.
async fn form(request: Request<Body>) -> Result<SummaryForm, String> {
    let (parts, body) = request.into_parts();
    let mut values = Vec::new();
    if matches!(parts.method, Method::POST | Method::PUT | Method::PATCH) && is_form(&parts.headers)? {
        let body = to_bytes(body, MAX_FORM).await.map_err(unread)?;
        values = values_of(&String::from_utf8_lossy(&body))?;
    }
    values.extend(values_of(parts.uri.query().unwrap_or_default())?);
    Ok(if values == ["true"] { SummaryForm::Short } else { SummaryForm::Full })
}

fn unread(error: axum::Error) -> String {
    let cause = error.into_inner();
    if cause.is::<LengthLimitError>() { "http: POST too large".to_owned() } else { cause.to_string() }
}

/// Whether the body is a form; without a content type it is not.
fn is_form(headers: &HeaderMap) -> Result<bool, String> {
    let Some(kind) = headers.get(header::CONTENT_TYPE) else { return Ok(false) };
    let kind = String::from_utf8_lossy(kind.as_bytes()).into_owned();
    Ok(media_type(&kind)? == "application/x-www-form-urlencoded")
}

/// Media type of a content type; errors have the wording of Go's `mime` package.
fn media_type(text: &str) -> Result<String, &'static str> {
    let (kind, parameters) = text.split_once(';').unwrap_or((text, ""));
    let kind = kind.trim().to_ascii_lowercase();
    check_media_type(&kind)?;
    for parameter in parameters.split(';').map(str::trim).filter(|p| !p.is_empty()) {
        let is_fine = parameter.split_once('=').is_some_and(|(key, value)| {
            is_token(key.trim())
                && (is_token(value) || (value.len() > 1 && value.starts_with('"') && value.ends_with('"')))
        });
        if !is_fine {
            return Err("mime: invalid media parameter");
        }
    }
    Ok(kind)
}

fn check_media_type(kind: &str) -> Result<(), &'static str> {
    let token = |text: &str| text.find(|c| !is_token_char(c)).unwrap_or(text.len());
    let (first, rest) = kind.split_at(token(kind));
    if first.is_empty() {
        return Err("mime: no media type");
    }
    if rest.is_empty() {
        return Ok(());
    }
    let rest = rest.strip_prefix('/').ok_or("mime: expected slash after first token")?;
    match token(rest) {
        0 => Err("mime: expected token after slash"),
        end if end < rest.len() => Err("mime: unexpected content after media subtype"),
        _ => Ok(()),
    }
}

fn is_token(text: &str) -> bool {
    !text.is_empty() && text.chars().all(is_token_char)
}

fn is_token_char(c: char) -> bool {
    c.is_ascii_graphic() && !r#"()<>@,;:\"/[]?="#.contains(c)
}

/// Values of the parameter in a form or query.
fn values_of(text: &str) -> Result<Vec<String>, String> {
    let mut values = Vec::new();
    let mut first_error = None;
    for pair in text.split('&').filter(|pair| !pair.is_empty()) {
        if pair.contains(';') {
            first_error.get_or_insert_with(|| "invalid semicolon separator in query".to_owned());
            continue;
        }
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        match (unescaped(key), unescaped(value)) {
            (Ok(key), Ok(value)) if key == SHORT.as_bytes() => {
                values.push(String::from_utf8_lossy(&value).into_owned())
            }
            (Ok(_), Ok(_)) => {}
            (Err(error), _) | (_, Err(error)) => drop(first_error.get_or_insert(error)),
        }
    }
    first_error.map_or(Ok(values), Err)
}

fn unescaped(text: &str) -> Result<Vec<u8>, String> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        match first {
            b'+' => out.push(b' '),
            b'%' => {
                let digits = tail.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
                let Some(byte) = digits.filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit())) else {
                    let wrong = String::from_utf8_lossy(tail.get(..2).unwrap_or(tail)).into_owned();
                    return Err(format!("invalid URL escape {:?}", format!("%{wrong}")));
                };
                out.push(u8::from_str_radix(byte, 16).map_err(|error| error.to_string())?);
                rest = tail.get(2..).unwrap_or_default();
            }
            byte => out.push(byte),
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use bytes::Bytes;
    use http_body_util::BodyExt;

    use super::*;
    use crate::ports::MetricsPage;
    use berth_metrics::exposition::ExpositionFormat;

    struct FakeStatistics(Result<&'static str, &'static str>);

    #[async_trait]
    impl Statistics for FakeStatistics {
        async fn summary(&self, form: SummaryForm) -> Result<Bytes, String> {
            let text = self.0.map_err(str::to_owned)?;
            Ok(Bytes::from(format!("{text} {form:?}")))
        }

        async fn metrics(&self, _: MetricsPage, _: ExpositionFormat, _: bool) -> Result<Bytes, String> {
            Err("not asked for here".to_owned())
        }

        fn process_start(&self) -> u64 {
            0
        }
    }

    async fn ask(method: &str, uri: &str, kind: Option<&str>, body: &str) -> (u16, String) {
        let mut request = Request::builder().method(method).uri(uri);
        if let Some(kind) = kind {
            request = request.header(header::CONTENT_TYPE, kind);
        }
        let request = request.body(Body::from(body.to_owned())).expect("a request");
        let response = serve(&FakeStatistics(Ok("page")), request).await;
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.expect("a body").to_bytes();
        (status, String::from_utf8(body.to_vec()).expect("text"))
    }

    #[tokio::test]
    async fn query_and_body_decide_the_form() {
        const FORM: Option<&str> = Some("application/x-www-form-urlencoded");
        let short = "/stats/summary?only_cpu_and_memory=true";
        for (case, method, uri, kind, body, expected) in [
            ("plain", "GET", "/stats/summary", None, "", "page Full"),
            ("AC-04b-M1", "GET", short, None, "", "page Short"),
            ("AC-04b-M2", "GET", "/?only_cpu_and_memory=true&only_cpu_and_memory=true", None, "", "page Full"),
            ("another value", "GET", "/?only_cpu_and_memory=1", None, "", "page Full"),
            ("escaped", "GET", "/?only%5Fcpu_and_memory=t%72ue", None, "", "page Short"),
            ("in the body", "POST", "/", FORM, "only_cpu_and_memory=true", "page Short"),
            ("in both", "POST", short, FORM, "only_cpu_and_memory=true", "page Full"),
            ("body is no form", "POST", "/", Some("text/plain"), "only_cpu_and_memory=true", "page Full"),
            ("body of a GET", "GET", "/", FORM, "only_cpu_and_memory=true", "page Full"),
            (
                "parameters",
                "POST",
                "/",
                Some("application/x-www-form-urlencoded; charset=utf-8"),
                "only_cpu_and_memory=true",
                "page Short",
            ),
        ] {
            assert_eq!(ask(method, uri, kind, body).await, (200, expected.to_owned()), "{case}");
        }
    }

    #[tokio::test]
    async fn what_is_no_form_is_refused() {
        let failed = |error: &str| (500, format!("Internal Error: parse form failed: {error}"));
        for (case, kind, error) in [
            ("AC-04b-M3", "invalid/content/type", "mime: unexpected content after media subtype"),
            ("empty", ";", "mime: no media type"),
            ("no subtype", "text/", "mime: expected token after slash"),
            ("no slash", "text plain", "mime: expected slash after first token"),
            ("parameter", "text/plain; charset", "mime: invalid media parameter"),
        ] {
            assert_eq!(ask("POST", "/", Some(kind), "").await, failed(error), "{case}");
        }
        assert_eq!(ask("GET", "/?a=%zz", None, "").await, failed("invalid URL escape \"%zz\""));
        assert_eq!(ask("GET", "/?a=%2", None, "").await, failed("invalid URL escape \"%2\""));
        assert_eq!(ask("GET", "/?a=1;b=2", None, "").await, failed("invalid semicolon separator in query"));
        let large = "x".repeat(MAX_FORM + 1);
        let form = Some("application/x-www-form-urlencoded");
        assert_eq!(ask("POST", "/", form, &large).await, failed("http: POST too large"));
    }

    #[tokio::test]
    async fn a_failed_summary_is_an_internal_error() {
        let statistics = FakeStatistics(Err("failed to get root cgroup stats"));
        let response = serve(&statistics, Request::new(Body::empty())).await;
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let body = response.into_body().collect().await.expect("a body").to_bytes();
        assert_eq!(body, "Internal Error: failed to get root cgroup stats");
    }
}

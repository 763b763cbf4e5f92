//! Content negotiation of metrics pages, and their response headers.
//!
//! Offers text 0.0.4, which is also the fallback, and delimited protobuf. OpenMetrics is never negotiated, as in the
//! reference. Implements spec 08 §1-2.

use prometheus::proto::MetricFamily;

use super::{protobuf, text_encoder};

/// Response header with the start time of the process, whole seconds since the epoch.
pub const PROCESS_START_HEADER: &str = "Process-Start-Time-Unix";

/// Escaping scheme for names outside of the legacy character set; Berth has no such names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum EscapingScheme {
    /// `allow-utf-8`
    AllowUtf8,
    /// `underscores`
    #[default]
    Underscores,
    /// `dots`
    Dots,
    /// `values`
    Values,
}

impl EscapingScheme {
    fn as_str(self) -> &'static str {
        match self {
            Self::AllowUtf8 => "allow-utf-8",
            Self::Underscores => "underscores",
            Self::Dots => "dots",
            Self::Values => "values",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        [Self::AllowUtf8, Self::Underscores, Self::Dots, Self::Values].into_iter().find(|e| e.as_str() == text)
    }
}

/// Wire format of a metrics page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExpositionFormat {
    /// Prometheus text format 0.0.4.
    Text(EscapingScheme),
    /// Length-delimited `io.prometheus.client.MetricFamily` messages.
    Delimited(EscapingScheme),
}

impl ExpositionFormat {
    /// Selects the best format for an `Accept` header; text if the header is missing or matches no offered format.
    pub fn negotiate(accept: Option<&str>) -> Self {
        let mut entries: Vec<AcceptEntry<'_>> =
            accept.unwrap_or_default().split(',').map(AcceptEntry::parse).filter(|e| e.weight > 0.0).collect();
        // The sort is stable: of equal weights the first one wins.
        entries.sort_by(|a, b| b.weight.total_cmp(&a.weight));
        entries.iter().find_map(AcceptEntry::format).unwrap_or(Self::Text(EscapingScheme::default()))
    }

    /// `Content-Type` of the response.
    pub fn content_type(self) -> String {
        match self {
            Self::Text(escaping) => {
                format!("text/plain; version=0.0.4; charset=utf-8; escaping={}", escaping.as_str())
            }
            Self::Delimited(escaping) => format!(
                "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited; \
                 escaping={}",
                escaping.as_str()
            ),
        }
    }

    /// Encodes the families into `out`; its previous content is cleared, its capacity is reused.
    pub fn encode(self, families: Vec<MetricFamily>, out: &mut Vec<u8>) {
        out.clear();
        match self {
            Self::Text(_) => {
                let mut page = String::from_utf8(std::mem::take(out)).expect("nothing is valid UTF-8");
                text_encoder::text(families, &mut page);
                *out = page.into_bytes();
            }
            Self::Delimited(_) => protobuf::delimited(families, out),
        }
    }
}

/// Response body of an internal server error (500).
pub fn error_body(error: &dyn std::fmt::Display) -> String {
    format!("An error has occurred while serving metrics:\n\n{error}\n")
}

/// An entry of an `Accept` header.
struct AcceptEntry<'a> {
    media: &'a str,
    weight: f64,
    version: Option<&'a str>,
    proto: Option<&'a str>,
    encoding: Option<&'a str>,
    escaping: Option<EscapingScheme>,
}

impl<'a> AcceptEntry<'a> {
    fn parse(entry: &'a str) -> Self {
        let mut parts = entry.split(';').map(str::trim);
        let mut found = Self {
            media: parts.next().unwrap_or_default(),
            weight: 1.0,
            version: None,
            proto: None,
            encoding: None,
            escaping: None,
        };
        for (key, value) in parts.filter_map(|p| p.split_once('=')) {
            let value = value.trim().trim_matches('"');
            match key.trim() {
                "q" => found.weight = value.parse().unwrap_or(1.0),
                "version" => found.version = Some(value),
                "proto" => found.proto = Some(value),
                "encoding" => found.encoding = Some(value),
                "escaping" => found.escaping = EscapingScheme::parse(value),
                _ => {}
            }
        }
        found
    }

    fn format(&self) -> Option<ExpositionFormat> {
        let escaping = self.escaping.unwrap_or_default();
        match self.media {
            "text/plain" if matches!(self.version, None | Some("0.0.4" | "")) => Some(ExpositionFormat::Text(escaping)),
            "application/vnd.google.protobuf"
                if self.proto == Some("io.prometheus.client.MetricFamily") && self.encoding == Some("delimited") =>
            {
                Some(ExpositionFormat::Delimited(escaping))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scraper_gets_what_it_accepts_or_text() {
        use EscapingScheme::*;
        let proto = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited";
        let newest =
            format!("{proto};q=0.6,application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3");
        for (case, accept, expected) in [
            ("AC-08-1", None, ExpositionFormat::Text(Underscores)),
            ("AC-08-2", Some("application/openmetrics-text; version=1.0.0"), ExpositionFormat::Text(Underscores)),
            ("AC-08-3", Some(proto), ExpositionFormat::Delimited(Underscores)),
            ("weights", Some(newest.as_str()), ExpositionFormat::Delimited(Underscores)),
            ("order", Some("text/plain;q=0.9, */*;q=0.1"), ExpositionFormat::Text(Underscores)),
            ("escaping", Some("text/plain;version=0.0.4;escaping=allow-utf-8"), ExpositionFormat::Text(AllowUtf8)),
            ("unknown escaping", Some("text/plain;escaping=x"), ExpositionFormat::Text(Underscores)),
            ("other version", Some("text/plain;version=9;escaping=dots"), ExpositionFormat::Text(Underscores)),
            ("other encoding", Some(&proto.replace("delimited", "text")), ExpositionFormat::Text(Underscores)),
            ("empty", Some(""), ExpositionFormat::Text(Underscores)),
            ("nonsense", Some(";;=,q="), ExpositionFormat::Text(Underscores)),
        ] {
            assert_eq!(ExpositionFormat::negotiate(accept), expected, "{case}");
        }
    }

    #[test]
    fn content_types_are_exact() {
        assert_eq!(
            ExpositionFormat::negotiate(None).content_type(),
            "text/plain; version=0.0.4; charset=utf-8; escaping=underscores"
        );
        assert_eq!(
            ExpositionFormat::Delimited(EscapingScheme::Values).content_type(),
            "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited; \
             escaping=values"
        );
        assert_eq!(error_body(&"x"), "An error has occurred while serving metrics:\n\nx\n");
    }

    #[test]
    fn both_formats_hold_the_same_families() {
        let registry = crate::Registry::new();
        registry.counter(crate::Stability::Alpha, "a_total", "A").inc();
        let mut out = vec![0xff];
        ExpositionFormat::negotiate(None).encode(registry.gather(), &mut out);
        assert_eq!(
            String::from_utf8(out).expect("text"),
            "# HELP a_total [ALPHA] A\n# TYPE a_total counter\na_total 1\n"
        );
    }
}

//! Log lines of the Rust side, on standard error as torch's own.

use std::fmt;

use tracing::level_filters::LevelFilter;
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// `[rank0] tpu_dist WARN: text`
struct Line {
    prefix: String,
}

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        write!(
            writer,
            "{}tpu_dist {}: ",
            self.prefix,
            event.metadata().level()
        )?;
        context.format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

/// Prints from the level that `TPU_DIST_LOG` names (`off`, `error`, `warn`, `info`,
/// `debug` or `trace`), by default from `warn`.
pub(crate) fn install() {
    let text = std::env::var("TPU_DIST_LOG").unwrap_or_default();
    let level = match text.as_str() {
        "" => Ok(LevelFilter::WARN),
        text => text.parse(),
    };
    let prefix =
        std::env::var("RANK").map_or_else(|_| String::new(), |rank| format!("[rank{rank}] "));
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level.clone().unwrap_or(LevelFilter::WARN))
        .with_writer(std::io::stderr)
        .event_format(Line { prefix })
        .finish();
    // Fails when the process has one already, which then gets the lines.
    let _ = tracing::subscriber::set_global_default(subscriber);
    if level.is_err() {
        tracing::warn!(
            "TPU_DIST_LOG={text}: expected off, error, warn, info, debug or trace; using warn"
        );
    }
}

"""Notices as e-mail: plain text, one message a stage, in one thread an incident."""

import smtplib
import ssl
from collections import Counter
from dataclasses import dataclass, field
from email.message import EmailMessage

from gradloc_reporter.notices.door import Notice, Refused, Stage, Unreachable
from gradloc_reporter.rendering import plain

TIMEOUT_S = 20.0
SUBJECT_MAX = 200


@dataclass(frozen=True, slots=True)
class MailServer:
    host: str
    port: int = 587
    starttls: bool = True
    user: str | None = None
    password: str | None = field(default=None, repr=False)


class Mail:
    stages: tuple[Stage, ...] = ("opened", "located", "resolved")

    def __init__(self, name: str, server: MailServer, *, sender: str, to: tuple[str, ...]) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self._server, self._sender, self._to = server, sender, to

    def post(self, notice: Notice) -> None:
        try:
            with smtplib.SMTP(self._server.host, self._server.port, timeout=TIMEOUT_S) as smtp:
                if self._server.starttls:
                    smtp.starttls(context=ssl.create_default_context())
                if self._server.user is not None:
                    smtp.login(self._server.user, self._server.password or "")
                smtp.send_message(self._message(notice))
        except (smtplib.SMTPRecipientsRefused, smtplib.SMTPSenderRefused, smtplib.SMTPAuthenticationError) as error:
            self.counts["refused"] += 1
            raise Refused(f"e-mail {self.name}: {type(error).__name__}; check addresses, user and password") from None
        except (smtplib.SMTPException, OSError) as error:
            self.counts["unreachable"] += 1
            raise Unreachable(f"e-mail {self.name}: {type(error).__name__}") from None
        self.counts["ok"] += 1

    def _message(self, notice: Notice) -> EmailMessage:
        message = EmailMessage()
        done = "" if notice.stage == "opened" else f" · {notice.stage}"
        # No line break may come from outside: it would begin another header.
        message["Subject"] = " ".join(f"{notice.telling.headline}{done}".split())[:SUBJECT_MAX]
        message["From"] = self._sender
        message["To"] = ", ".join(self._to)
        first = f"<{_word(notice.incident_id)}.opened@gradloc>"
        message["Message-ID"] = first if notice.stage == "opened" else first.replace(".opened", f".{notice.stage}")
        if notice.stage != "opened":
            message["In-Reply-To"] = message["References"] = first
        message.set_content(plain(notice.telling) + "\n")
        return message


def _word(text: str) -> str:
    return "".join(char if char.isascii() and char.isalnum() else "-" for char in text)[:100]
